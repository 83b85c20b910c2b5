"""The files of a run's readings: bounded, readable while they are written, and after damage."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import pathlib

import pytest

from syncline.core.media import MOST_MEDIA, MediaItem
from syncline.core.series import JOB, MEMBER, Point, merge_points, point
from syncline.errors import StoreError
from syncline.store import media, series
from syncline.store.lines import LinesWriter, parts, read_lines
from syncline.store.series import SeriesReader, SeriesWriter


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "series.db"


def test_what_is_written_is_read_while_the_writer_goes_on(path: pathlib.Path) -> None:
    writer, reader = SeriesWriter(path), SeriesReader(path)
    writer.write(
        1000.2, {"": {"step": 3, "bad": math.nan}, "worker-0": {"cores": 1.5}}, [("loss", point(3, 1000.1, 2.5))]
    )
    writer.write(1001.2, {"": {"step": 4}}, [("loss", point(4, 1001.1, math.nan))], {"look": b"{}"})
    rows = reader.rows()
    assert (rows.at, rows.columns) == ([1000.0, 1001.0], {"step": [3.0, 4.0]})
    assert reader.rows("worker-0").columns == {"cores": [1.5]} and reader.subjects() == ["worker-0"]
    assert reader.curve("loss").value == [2.5, None] and reader.metrics() == ["loss"]
    assert reader.curve("nothing").step == [] and reader.rows("nobody").at == []
    assert reader.facts() == {"look": b"{}"}
    writer.close()


def test_another_coordinator_goes_on_where_the_first_one_died(path: pathlib.Path) -> None:
    first = SeriesWriter(path)
    first.write(10.0, {"": {"a": 1.0}}, [("loss", point(k, 10.0, float(k))) for k in range(5)])
    second = SeriesWriter(path)  # the first one did not close
    second.write(11.0, {"": {"b": 2.0, "a": 3.0}}, [("loss", point(5, 11.0, 5.0))])
    reader = SeriesReader(path)
    assert reader.curve("loss").step == [0, 1, 2, 3, 4, 5]
    assert reader.rows().columns == {"a": [1.0, 3.0], "b": [None, 2.0]}
    first.close()
    second.close()


def test_a_week_is_bounded(path: pathlib.Path) -> None:
    """A row every four minutes in place of one a second: old ones are merged, means are kept."""
    writer, reader = SeriesWriter(path), SeriesReader(path)
    for minute in range(0, 7 * 24 * 60, 4):
        writer.write(60.0 * minute, {"": {"x": 5.0, "step": minute}, "worker-0": {"x": 5.0}})
    whole, own = reader.rows(most=10**6), reader.rows("worker-0", most=10**6)
    assert set(whole.columns["x"]) == {5.0} and whole.at == sorted(whole.at)
    assert 720 + 650 < len(whole.at) < 720 + 1_008 + 20 and len(own.at) < 90 + 672 + 20
    assert whole.at[0] < 600 and whole.at[-1] > 60.0 * (7 * 24 * 60 - 10)
    assert len(reader.rows(most=100).at) <= 101
    writer.close()
    most = sum(min(tier.kept_seconds, 604_800) / tier.seconds for tier in MEMBER.tiers)
    of_job = sum(min(tier.kept_seconds, 604_800) / tier.seconds for tier in JOB.tiers)
    # 200 members with ten columns of six bytes, and 100 bytes around them: within the 100 MB of a week.
    assert 200 * most * (10 * 6 + 100) + of_job * (20 * 6 + 100) < 60e6


def test_the_last_tier_is_halved(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = series.JOB.__class__(tiers=(JOB.tiers[0], JOB.tiers[-1]), most_rows=10)
    monkeypatch.setattr(series, "JOB", small)
    writer = SeriesWriter(path)
    for number in range(200):
        writer.write(600.0 * number, {"": {"x": 1.0}})
    rows = SeriesReader(path).rows()
    assert 5 <= len(rows.at) <= 14 and set(rows.columns["x"]) == {1.0}
    writer.close()


def test_a_long_curve_is_bounded_and_keeps_its_extremes(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "most_points", lambda num_curves: 100)
    writer = SeriesWriter(path)
    for k in range(5_000):
        writer.write(float(k), {}, [("loss", point(k, float(k), -7.0 if k == 1234 else 1.0))])
        if k == 3_000:
            writer.close()
            writer = SeriesWriter(path)  # knows how many readings one point has
    writer.finish()
    curve = SeriesReader(path).curve("loss")
    assert 40 <= len(curve.step) <= 105 and min(low for low in curve.low if low is not None) == -7.0
    assert curve.step[-1] == 4_999 and curve.step == sorted(curve.step)
    writer.close()


@pytest.mark.parametrize("most", [1, 7, 33, 99, 100, 1_000])
def test_merged_points_have_the_mean_and_the_extremes(path: pathlib.Path, most: int) -> None:
    """As `merge_points` makes them, of points that stand for several readings too. Some have no value; steps go back
    where a job begins again at a checkpoint."""
    writer, reader = SeriesWriter(path), SeriesReader(path)
    values = [math.nan if k % 5 == 0 or 40 <= k < 60 else math.sin(k) for k in range(100)]
    points = [
        Point(float(k if k < 50 else k - 30), float(k), value, value - 1.0, value + 2.0, 1 + k % 3)
        for k, value in enumerate(values)
    ]
    writer.write(1.0, {}, [("loss", one) for one in points])
    writer.close()
    stride = -(-len(points) // most)
    wanted = [merge_points(points[k : k + stride]) for k in range(0, len(points), stride)]
    found = reader.curve("loss", most=most)
    assert [found.step, found.at] == [[one.step for one in wanted], [one.at for one in wanted]]
    for column in ("value", "low", "high"):
        told = [math.nan if value is None else value for value in getattr(found, column)]
        assert told == pytest.approx([getattr(one, column) for one in wanted], nan_ok=True)
    assert reader.curves(["gone", "loss"])["gone"].step == []


def test_too_many_metrics_are_left_out(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "MOST_METRICS", 20)
    writer = SeriesWriter(path)
    writer.write(1.0, {}, [(f"m{k}", point(1, 1.0, 1.0)) for k in range(500)])
    assert len(SeriesReader(path).metrics()) == 20
    writer.close()


@pytest.mark.parametrize("content", [b"no database at all" * 400, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_put_aside(path: pathlib.Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError, match="cannot be used"):
        SeriesReader(path).rows()
    writer = SeriesWriter(path)
    assert writer.put_aside is not None and writer.put_aside.read_bytes() == content
    writer.write(1.0, {"": {"x": 1.0}})
    assert SeriesReader(path).rows().columns == {"x": [1.0]}
    writer.close()


def test_a_run_without_readings_says_so(path: pathlib.Path) -> None:
    with pytest.raises(StoreError, match="there are no readings"):
        SeriesReader(path).rows()


# -- lines ------------------------------------------------------------------------------------------------


def test_lines_stay_bounded_and_old_ones_get_sparse(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = LinesWriter(path, 40_000)
    for k in range(20_000):
        writer.write([{"k": k, "text": "x" * 20}])
    writer.close()
    files = [*parts(path), path]
    assert sum(file.stat().st_size for file in files) <= 40_000
    numbers = [json.loads(line)["k"] for file in files for line in file.read_text().splitlines()]
    assert numbers == sorted(numbers) and numbers[-1] == 19_999 and numbers[0] < 19_000
    gaps = [b - a for a, b in itertools.pairwise(numbers)]
    assert gaps[-100:] == [1] * 100 and max(gaps[:100]) > 1, "the newest are whole, the oldest are thinned"
    assert [line["k"] for line in read_lines(path, 10).lines] == list(range(19_990, 20_000))


def test_of_a_large_file_only_the_newest_parts_are_read(tmp_path: pathlib.Path) -> None:
    """A damage in an old part hides no new line; all lines have it. A part that has just begun is not enough."""
    path = tmp_path / "events.jsonl"
    writer = LinesWriter(path, 40_000)
    for k in range(1_000):
        writer.write([{"k": k, "text": "x" * 20}])
    writer.close()
    first, *_, last = parts(path)
    first.write_bytes(b"damage\n")
    found = read_lines(path, 10)
    assert [line["k"] for line in found.lines] == list(range(990, 1_000)) and found.damage == ""
    assert read_lines(path, 1_000).lines == [] and first.name in read_lines(path, 1_000).damage
    path.write_bytes(b"")
    in_last = [json.loads(line)["k"] for line in last.read_text().splitlines()]
    assert [line["k"] for line in read_lines(path, 5).lines] == in_last[-5:]


def test_a_line_cut_off_by_a_crash_is_taken_away(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"number":1}\n{"numb')
    assert read_lines(path, 10).lines == [{"number": 1}], "while another process writes it"
    writer = LinesWriter(path, 10_000)
    writer.write([{"number": 2}])
    writer.close()
    assert read_lines(path, 10).lines == [{"number": 1}, {"number": 2}]


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\n", b"[1]\n", b'{"a":\n', b"[" * 100_000 + b"\n", b"x" * 2_000_000 + b"\n"]
)
def test_damaged_lines_are_read_up_to_the_damage(tmp_path: pathlib.Path, damage: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"number":1}\n' + damage + b'{"number":3}\n')
    found = read_lines(path, 10)
    assert found.lines == [{"number": 1}] and "events.jsonl, line 2" in found.damage


def test_a_full_disk_leaves_no_half_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    writer = LinesWriter(path, 100_000)
    writer.write([{"number": 1}])
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        real(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StoreError, match="No space left"):
            writer.write([{"number": 2}])
    writer.write([{"number": 3}])
    writer.close()
    assert [line["number"] for line in read_lines(path, 10).lines] == [1, 3]


def test_a_link_is_not_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "other").write_text("precious")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(StoreError):
        LinesWriter(tmp_path / "events.jsonl", 1000)
    assert (tmp_path / "other").read_text() == "precious"


# -- images, histograms and texts -------------------------------------------------------------------------


def test_media_of_a_name_are_thinned_and_the_newest_stays(path: pathlib.Path) -> None:
    writer, reader = SeriesWriter(path), SeriesReader(path)
    for step in range(1000):
        writer.write(step, {}, media=[(MediaItem("a", "image", step, b"%d" % step), float(step), "worker-0")])
    kept = [one.step for one in reader.media()]
    assert 15 <= len(kept) <= media.MOST_OF_A_NAME["image"] and kept == sorted(kept)
    assert kept[-1] == 999 and kept[0] < 100, "spread over the run"
    assert reader.media_content(reader.media()[-1].id) == ("image", b"999")
    writer.close()


def test_all_media_together_are_bounded(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after another coordinator has taken over, and where every name has one only."""
    monkeypatch.setattr(media, "MOST_BYTES", 100_000)
    for life in range(3):
        writer = SeriesWriter(path)
        for step in range(100):
            items = [MediaItem(f"n{(7 * step + k) % 50}", "text", step, bytes(4_000)) for k in range(3)]
            writer.write(step, {}, media=[(item, 1.0, "worker-0") for item in items])
        writer.close()
        kept = SeriesReader(path).media()
        assert sum(one.num_bytes for one in kept) <= 100_000 and len(kept) > 20, life
        assert max(one.step for one in kept) == 99


def test_too_many_names_of_media_are_left_out(path: pathlib.Path) -> None:
    writer = SeriesWriter(path)
    writer.write(1.0, {}, media=[(MediaItem(f"n{k}", "text", 1, b"x"), 1.0, "w") for k in range(MOST_MEDIA + 50)])
    assert len(SeriesReader(path).media()) == MOST_MEDIA
    writer.close()


def test_a_run_from_before_there_were_media_has_none(path: pathlib.Path) -> None:
    import sqlite3

    SeriesWriter(path).close()
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE media")
    assert SeriesReader(path).media() == [] and SeriesReader(path).media_content(1) is None
    SeriesWriter(path).close()
    assert SeriesReader(path).media() == []

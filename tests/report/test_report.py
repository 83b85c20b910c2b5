"""`syncline report` and `syncline compare`: what is in the files, what is not, and runs that are damaged."""

from __future__ import annotations

import html.parser
import math
import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.made import NASTY, make_run
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.core.units import number_told
from syncline.report.charts import Line, chart, ticks
from syncline.report.reading import read_run
from syncline.report.several import at_steps, comparison, comparison_page, differences, value_at
from syncline.report.single import report
from syncline.store.lines import LinesWriter
from syncline.store.series import CurvePoints

_EMPTY = {"meta", "path", "br", "img"}


class Looked(html.parser.HTMLParser):
    """The tags and the text of a page; tags that do not match fail the test."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _EMPTY or (tag == "path" and not self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, (tag, self._open)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def check_alone(page: str) -> Looked:
    """It loads nothing and runs nothing."""
    looked = Looked(page)
    names = {tag for tag, _ in looked.tags}
    assert not names & {"script", "link", "iframe", "img", "object", "embed", "form", "a", "base"}, names
    attributes = {name for _, attrs in looked.tags for name in attrs}
    assert not {name for name in attributes if name.startswith("on") or name in ("src", "href")}, attributes
    assert "url(" not in page and "@import" not in page and "http://" not in page and "https://" not in page
    policy = next(a["content"] for t, a in looked.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'")
    return looked


def test_a_report_has_all_of_a_run(tmp_path: pathlib.Path) -> None:
    run = read_run(make_run(tmp_path / "one", metrics=("loss", "top-5/accuracy"), policy="async", stop=("loss<=1",)))
    text = check_alone(report(run)).text
    for words in (
        "one", "all workers have finished", "loss", "top-5/accuracy", "0.368", "slow: worker-1 died", "look at it",
        "worker-0", "server-0", "the job has formed", "async", "loss<=1", "samples per second", "64", "100 s",
        "Staleness", "200 MB",
    ):  # fmt: skip
        assert words in text, words
    assert "max_restarts" in text and [*run.changed_settings] == ["policy", "stop", "workers"]


def test_what_users_write_stays_text(tmp_path: pathlib.Path) -> None:
    """Names of metrics, runs and members, events, settings, verdicts."""
    folder = make_run(tmp_path / "<b>one", metrics=("<script>x", "a&b\u202e"), text=NASTY, codec_exempt=NASTY)
    looked = check_alone(report(read_run(folder)))
    assert NASTY in looked.text and "<script>x" in looked.text and "<b>one" in looked.text
    other = make_run(tmp_path / "two", metrics=("<script>x",), text=NASTY)
    both = check_alone(comparison_page([read_run(folder), read_run(other)]))
    assert NASTY in both.text and "<script>x" in both.text
    assert "\u202e" not in comparison([read_run(folder), read_run(other)])


def test_damaged_series_are_replaced_by_lines_and_said(tmp_path: pathlib.Path) -> None:
    folder = make_run(tmp_path / "one")
    whole = read_run(folder)
    (folder / "series.db").write_bytes(b"no database" * 1000)
    for side in ("-wal", "-shm"):
        (folder / f"series.db{side}").unlink(missing_ok=True)
    run = read_run(folder)
    assert run.curves["loss"].value == pytest.approx(whole.curves["loss"].value)
    assert run.figures.columns["samples_per_second"] == [64.0] * 10 and run.step == 100
    assert any("series.db" in damage for damage in run.damages)
    assert "damaged" in check_alone(report(run)).text


def test_damaged_series_are_shown_up_to_the_damage(tmp_path: pathlib.Path) -> None:
    """The end of the database is overwritten: what lies before can be read, and nothing raises."""
    folder = make_run(tmp_path / "one", num_steps=300)
    for side in ("-wal", "-shm"):
        (folder / f"series.db{side}").unlink(missing_ok=True)
    data = (folder / "series.db").read_bytes()
    num_damaged = 0
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        keep = int(len(data) * share) // 4096 * 4096
        (folder / "series.db").write_bytes(data[:keep] + b"\xff" * (len(data) - keep))
        run = read_run(folder)
        assert run.curves["loss"].value, share
        num_damaged += any(damage in check_alone(report(run)).text for damage in run.damages)
    assert num_damaged >= 2
    (folder / "series.db").write_bytes(data[: len(data) // 2])
    check_alone(report(read_run(folder)))


def test_damaged_events_are_shown_up_to_the_damage(tmp_path: pathlib.Path) -> None:
    folder = make_run(tmp_path / "one")
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "events.jsonl").write_bytes(lines[0] + b'{"number": "x"}\n' + lines[2])
    text = check_alone(report(read_run(folder))).text
    assert "the job has formed" in text and "it has ended" not in text and "events.jsonl, line 2" in text


def test_lines_that_are_no_metrics_are_passed_over(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    writer = LinesWriter(folder / "metrics.jsonl", 1 << 20)
    writer.write([{"at": "x", "step": 1, "metrics": {"a": 1}}, {"at": 1.0, "step": 2, "metrics": 7},
                  {"at": 1.0, "step": 3, "metrics": {"a": "x", "b": None, "c": True}},
                  {"at": 2.0, "step": 4, "metrics": {"a": 0.5}, "job": {"step": "x"}}])  # fmt: skip
    writer.close()
    run = read_run(folder)
    assert run.last("a") == 0.5 and run.step == 4
    assert "it is not known how it ended" in check_alone(report(run)).text


def test_a_comparison_shows_what_differs(tmp_path: pathlib.Path) -> None:
    one = read_run(make_run(tmp_path / "one", policy="async", rate=0.01))
    two = read_run(make_run(tmp_path / "two", policy="sync", rate=0.02, num_steps=50, metrics=("loss", "only here")))
    assert differences([one, two]) == [("policy", "async", "sync")]
    rows = at_steps([one, two], "loss")
    assert rows[0] == ("1", "0.99", "0.98") and rows[-1] == ("100", "0.368", "–") and len(rows) == 8
    text = comparison([one, two])
    assert "only here" in text and "setting  " in text and all(len(line) <= 100 for line in text.splitlines())
    looked = check_alone(comparison_page([one, two]))
    lines = [a for tag, a in looked.tags if tag == "path" and a.get("class", "").startswith("line")]  # type: ignore[union-attr]
    assert [a["class"] for a in lines][:2] == ["line c0", "line c1"], "both curves are in one chart"


def test_values_between_points() -> None:
    curve = CurvePoints([1, 5, 9], [0, 0, 0], [1.0, None, 3.0], [], [])
    assert [value_at(curve, step) for step in (0, 1, 4, 6, 9, 10)] == [None, 1.0, 1.0, 1.0, 3.0, None]


def invoke(*words: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, list(words))
    return found.exit_code, found.stdout, str(found.exception or "")


def test_what_people_type(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "one")
    make_run(tmp_path / "runs" / "two", policy="async")
    (tmp_path / "runs" / "no run").mkdir()
    assert invoke("report", "one")[:2] == (0, "one.html\n")
    check_alone((tmp_path / "one.html").read_text())
    check_alone(invoke("report", "runs/one", "-o", "-")[1])
    assert "there is no run three" in invoke("report", "three")[2]
    assert "is a folder, but no run" in invoke("report", "no run")[2]
    assert "cannot be written" in invoke("report", "one", "-o", "none/one.html")[2]
    code, text, _ = invoke("compare", "one", "two", "--html", "both.html")
    assert code == 0 and re.search(r"policy +sync +async", text)
    check_alone((tmp_path / "both.html").read_text())
    assert "give 2 to 8 runs" in invoke("compare", "one")[2]
    assert "given twice" in invoke("compare", "one", "runs/one")[2]
    assert "they have: loss" in invoke("compare", "one", "two", "--metric", "los")[2]
    assert "there is no run three" in invoke("compare", "one", "three")[2]


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_few_and_inside(low: float, length: float) -> None:
    high = low + length
    found = ticks(low, high)
    if high - low > 1e-9 * abs(low):
        assert 1 <= len(found) <= 11
        assert all(low - 1e-6 * (high - low) <= tick <= high + 1e-6 * (high - low) for tick in found)


@pytest.mark.parametrize("y", [[], [None], [math.nan], [1.0], [1.0, 1.0], [math.inf, 1.0, None, -1e300, 5.0]])
def test_any_values_make_a_chart_or_none(y: list[float | None]) -> None:
    made = chart("x", [Line(label="x", x=list(range(len(y))), y=y, low=y, high=y)])
    assert "nan" not in made and "inf" not in made
    assert bool(made) == any(value is not None and math.isfinite(value) for value in y)
    if made:
        Looked(made)
    assert number_told(math.nan) == "–" and number_told(12345.6) == "12,346" and number_told(1.5e-7) == "1.50e-07"

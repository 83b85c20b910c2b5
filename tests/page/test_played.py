"""The page in a real Chromium, beside a job that the test plays: all that looks say is shown. `make test-page`."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.page.browsing import opened, wait_until
from tests.page.served import Served, look, served
from tests.patience import PATIENCE

from syncline.core.media import Histogram, Image, MediaItem
from syncline.core.series import point
from syncline.stats import Event, JobLook, JobVerdict, MemberFigures, StageStats, Wait
from syncline.store.series import SeriesWriter

pytestmark = pytest.mark.page

#: Of every object of JavaScript.
ODD_NAMES = ("constructor", "toString", "__proto__", "hasOwnProperty")


@pytest.fixture
def page(tmp_path: pathlib.Path) -> Iterator[Served]:
    with served(tmp_path) as found:
        yield found


def record(
    folder: pathlib.Path,
    metrics: dict[str, list[float]],
    events: list[Event] | None = None,
    media: list[MediaItem] | None = None,
    damage: str = "",
    verdict: str = "all 1 worker ended well",
) -> None:
    """The files of a run: one point of each metric a second."""
    folder.mkdir(exist_ok=True)
    writer = SeriesWriter(folder / "series.db")
    points = [(name, point(k, 1e9 + k, value)) for name, own in metrics.items() for k, value in enumerate(own, 1)]
    facts = {"look": msgspec.json.encode(look(50, verdict=verdict)), "settings": b"{}"}
    writer.write(1e9 + 1, {"": {"step": 1.0, "cores": 1.0}}, points, facts)
    writer.write(1e9 + 2, {"": {"step": 2.0, "cores": 2.0}})
    for k, item in enumerate(media or []):
        writer.write(1e9 + 3 + k, {}, media=[(item, 1e9 + 3 + k, "worker-0")])
    writer.close()
    lines = [msgspec.json.encode(event).decode() + "\n" for event in events or []]
    (folder / "events.jsonl").write_text("".join(lines) + damage)


def event(number: int, text: str, kind: str = "note") -> Event:
    return Event(number=number, at=1e9 + number, step=number, kind=kind, text=text)


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


def show(page: Served, found: JobLook) -> None:
    """When the browser listens: it gets this look, not only the newest one."""
    wait_for(lambda: bool(page.job.watchers))
    page.job.show(found)


#: Of a worker whose second process computes for three times as long as the first.
PIPELINE = tuple(
    StageStats(stage=k, num_steps=3, busy_seconds=0.1 * (1 + 2 * k), step_seconds=0.4, layers="<b>", sent_bytes=3072)
    for k in range(2)
)


def test_a_look_is_told_in_words_and_pictures(page: Served, browser: Any) -> None:
    """A sentence for a wait, a verdict with advice; splits with the servers' part, shares, staleness, who sends."""
    server = MemberFigures(name="server-0", role="server", num_rounds=3, apply=0.02, sent_per_second=5e5)
    workers = tuple(
        MemberFigures(
            name=f"worker-{k}", role="worker", step=7, num_steps=3, compute=0.1, data=0.04, stage=0.02, wait=0.05,
            pull=0.03, share=(0.75, 0.25)[k], lag=k, peers={"server-0": 1e6 / (k + 1)}, stages=(PIPELINE, ())[k],
        )
        for k in range(2)
    )  # fmt: skip
    verdict = JobVerdict(
        kind="straggler", subject="worker-1", text="worker-1 is 2.1 times slower", advice="look there"
    )
    made = look(
        1,
        members=(server, *workers),
        why="every worker waits for worker-1",
        waits=(Wait("", 3, ["worker-1"], 2.0, "round"),),
        staleness_counts=(6, 2, 0, 2),
    )
    page.job.show(msgspec.structs.replace(made, verdicts=(verdict,)))
    shown, errors = opened(browser, page.server.new_link())
    wait_until(shown, "document.querySelectorAll('#splits .bar-row').length === 2")
    notices = [one.inner_text() for one in shown.locator("#notices .notice").all()]
    assert len(notices) == 2 and "Every worker waits for worker-1" in notices[0]
    assert "worker-1 is 2.1 times slower" in notices[1] and "look there" in notices[1]
    parts = shown.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#splits .bar-row:first-child i')]"
        ".map((one) => [one.dataset.part, Number.parseFloat(one.style.width)]))"
    )
    assert parts == pytest.approx(
        {"compute": 30.0, "data": 20.0, "stage": 10.0, "wait": 15.0, "apply": 10.0, "pull": 15.0}, abs=0.01
    )
    assert "apply" in shown.locator("#legend").inner_text()
    assert [one.inner_text().split("\n") for one in shown.locator("#stages .bar-row").all()] == [
        ["worker-0, stage 0", "25 %"],
        ["worker-0, stage 1", "75 %"],
    ]
    assert "bubble: worker-0 50 %" in shown.locator("#stage-note").inner_text()
    assert "25 %, 75 %" in shown.locator("#member-table tr[data-member='worker-0']").inner_text()
    assert shown.locator("#step-charts .names").last.inner_text().count("apply") == 1
    assert [one.inner_text().split() for one in shown.locator("#shares .bar-row").all()] == [
        ["worker-0", "75", "%"],
        ["worker-1", "25", "%"],
    ]
    columns = [one.inner_text().split() for one in shown.locator("#staleness .column").all()]
    assert columns[:4] == [["60", "%", "0"], ["20", "%", "1"], ["2–3"], ["20", "%", "4–7"]]
    assert shown.locator("#picture [data-member]").count() == 3
    sent = [one.text_content() for one in shown.locator("#picture path title").all()]
    assert sent == ["server-0 ↔ worker-0: 1 MB/s", "server-0 ↔ worker-1: 500 kB/s"]
    shown.locator("#picture [data-member='worker-1'] circle").click()
    wait_until(shown, "document.querySelector('tr.chosen')?.dataset.member === 'worker-1'")
    assert [one for one in errors if "404" not in one] == []


def test_gpus_are_shown_where_there_are_any(page: Served, browser: Any) -> None:
    """A GPU that no driver tells of has its memory only. Without a GPU there is no column, and no chart of zeros."""
    plain = tuple(MemberFigures(name=f"worker-{k}", role="worker") for k in range(3))
    page.job.show(look(1, members=plain))
    shown, errors = opened(browser, page.server.new_link())
    wait_until(shown, "document.querySelectorAll('#member-table tbody tr').length === 3")
    titles = "[...document.querySelectorAll('#machine-charts > :not([hidden])')].map((one) => one.innerText)"
    assert "GPU" not in shown.locator("#member-table thead").inner_text()
    assert "GPU" not in "".join(shown.evaluate(titles))
    told = ({"gpu_bytes": 3 * 10**9, "gpu_busy": 0.9}, {"gpu_bytes": 10**9}, {})
    mixed = tuple(msgspec.structs.replace(one, **more) for one, more in zip(plain, told, strict=True))
    show(page, look(2, members=mixed))
    wait_until(shown, "document.querySelector('#member-table thead').innerText.includes('GPU')")
    rows = shown.locator("#member-table tbody tr").all_inner_texts()
    assert ["3 GB, 90 %" in rows[0], "1 GB" in rows[1] and "%" not in rows[1], "GB" not in rows[2]] == [True] * 3
    wait_until(shown, f"{titles}.some((one) => one.includes('GPUs busy')) && {titles}.join().includes('90 %')")
    assert "GPU memory" in "".join(shown.evaluate(titles))
    assert [one for one in errors if "404" not in one] == []


def test_media_are_shown_as_cards(page: Served, tmp_path: pathlib.Path, browser: Any) -> None:
    """An image, a histogram and a text; the slider shows earlier steps, and a text is never read as a page."""
    media = [
        MediaItem("shown", "image", 3, Image(np.zeros((4, 5))).content("shown")),
        MediaItem("weights", "histogram", 4, Histogram([1.0, 2.0, 2.0]).content("weights")),
        MediaItem("said", "text", 5, b"at first"),
        MediaItem("said", "text", 6, b"<b>then</b>"),
    ]
    record(tmp_path / "before", {"loss": [1.0]}, media=media)
    shown, errors = opened(browser, page.server.new_link())
    shown.select_option("#run", "before")
    wait_until(shown, "document.querySelectorAll('#media-cards .card').length === 3")
    wait_until(shown, "document.querySelector('[data-media=shown] img')?.naturalWidth === 5")
    wait_until(shown, "document.querySelectorAll('[data-media=weights] .bins i').length > 1")
    assert "3 values" in shown.locator("[data-media=weights]").inner_text()
    wait_until(shown, "document.querySelector('[data-media=said] pre')?.textContent === '<b>then</b>'")
    shown.locator("[data-media=said] input").press("ArrowLeft")
    wait_until(shown, "document.querySelector('[data-media=said] pre').textContent === 'at first'")
    assert "step 5" in shown.locator("[data-media=said] h3").inner_text()
    assert [one for one in errors if "404" not in one] == []


def test_a_damaged_event_file_is_shown_up_to_the_damage(page: Served, tmp_path: pathlib.Path, browser: Any) -> None:
    record(tmp_path / "before", {"loss": [1.0]}, [event(1, "the job has formed", "join")], damage="no line\n")
    shown, _ = opened(browser, page.server.new_link())
    shown.select_option("#run", "before")
    wait_until(shown, "document.querySelector('#event-list').innerText.includes('the job has formed')")
    note = shown.locator("#events-note").inner_text()
    assert "up to a damage of the file" in note and "line 2" in note
    assert shown.locator("#event-list li").count() == 1


def test_metrics_may_have_the_names_of_javascript(page: Served, tmp_path: pathlib.Path, browser: Any) -> None:
    """They were taken for what every object has: the page broke at every look."""
    record(tmp_path / "before", {name: [1.0, 2.0] for name in ODD_NAMES})
    page.job.show(look(1))
    shown, errors = opened(browser, page.server.new_link())
    for number in (2, 3):
        readings = tuple((name, number, 1e9 + number, float(number)) for name in ODD_NAMES)
        show(page, msgspec.structs.replace(look(number), readings=readings))
    wait_until(shown, f"document.querySelectorAll('#metric-charts canvas').length === {len(ODD_NAMES)}")
    ending = "[...document.querySelectorAll('#metric-charts h3')].filter((one) => one.innerText.endsWith('3'))"
    wait_until(shown, f"{ending}.length === {len(ODD_NAMES)}")
    shown.select_option("#run", "before")
    ending = "[...document.querySelectorAll('#metric-charts h3')].filter((one) => one.innerText.endsWith('2'))"
    wait_until(shown, f"{ending}.length === {len(ODD_NAMES)}")
    assert [one for one in errors if "404" not in one] == []


def test_nothing_stays_of_a_run_that_was_shown(page: Served, tmp_path: pathlib.Path, browser: Any) -> None:
    """Neither its tiles, members and events beside the error of another run, nor that error on a good one."""
    record(tmp_path / "good", {"loss": [1.0, 2.0]}, [event(1, "the good one has formed")])
    record(tmp_path / "broken", {"loss": [1.0]}, [event(1, "x")])
    (tmp_path / "broken" / "series.db").write_bytes(b"x" * 10_000)
    page.job.show(look(1))
    shown, _ = opened(browser, page.server.new_link())
    shown.select_option("#run", "good")
    wait_until(shown, "document.querySelector('#event-list').innerText.includes('the good one')")
    for _ in range(2):
        shown.select_option("#run", "broken")
        wait_until(shown, "document.querySelector('#notices').innerText.includes('broken cannot be shown')")
        for place in ("#tiles *", "#member-table tbody tr", "#event-list li", "#metric-charts canvas", "#splits *"):
            assert shown.locator(place).count() == 0, place
        shown.select_option("#run", "good")
        wait_until(shown, "document.querySelectorAll('#member-table tbody tr').length === 2")
        assert "cannot be shown" not in shown.locator("#notices").inner_text()
        assert shown.locator("#state").inner_text() == "ended"


def test_of_two_quick_choices_the_later_one_counts(page: Served, tmp_path: pathlib.Path, browser: Any) -> None:
    """The answers for the first run come after those for the second one."""
    record(tmp_path / "slow", {"of-slow": [1.0, 2.0]}, [event(1, "slow has formed")])
    record(tmp_path / "quick", {"of-quick": [1.0, 2.0]}, [event(1, "quick has formed")])
    shown, errors = opened(browser, page.server.new_link())
    held: list[Any] = []
    shown.route("**/api/v1/runs/slow/rows", lambda route: held.append(route))  # noqa: PLW0108  # it must be Python's
    shown.select_option("#run", "slow")
    until = time.monotonic() + PATIENCE
    while not held:
        shown.wait_for_timeout(20)
        assert time.monotonic() < until
    shown.select_option("#run", "quick")
    wait_until(shown, "document.querySelector('#event-list').innerText.includes('quick has formed')")
    with shown.expect_response("**/api/v1/runs/slow/rows"):
        held[0].continue_()
    shown.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert "slow" not in shown.locator("#event-list").inner_text()
    assert shown.locator("#metric-charts h3").all_inner_texts()[0].startswith("of-quick")
    assert shown.locator("#metric-charts h3").count() == 1 and shown.locator("#step-charts canvas").count() <= 3
    assert [one for one in errors if "404" not in one] == []


def test_looks_that_were_lost_are_made_up_for(page: Served, tmp_path: pathlib.Path, browser: Any) -> None:
    """A browser that is slow gets the newest looks only. Events and readings of the others are asked for."""
    page.job.show(look(1))
    shown, errors = opened(browser, page.server.new_link())
    show(page, look(2))
    wait_until(shown, "document.querySelectorAll('#event-list li').length >= 1")
    wait_until(shown, "document.querySelector('.tile .value').textContent === '2'")
    lost = [event(number, f"event {number}") for number in range(1, 6)]
    record(tmp_path / "now", {"loss": [0.9, 0.8, 0.7], "lost": [5.0]}, lost)
    show(page, look(6))
    wait_until(shown, "document.querySelectorAll('#event-list li').length === 6")
    for number in range(3, 6):
        assert f"event {number}" in shown.locator("#event-list").inner_text()
    wait_until(shown, "document.querySelectorAll('#metric-charts canvas').length === 2")
    assert "lost" in shown.locator("#metric-charts").inner_text()
    assert [one for one in errors if "404" not in one] == []


def test_a_filter_finds_metrics_beyond_the_first(page: Served, tmp_path: pathlib.Path, browser: Any) -> None:
    """Of a run with hundreds only those that are shown are loaded: the others when the filter names them."""
    record(tmp_path / "before", {f"m{k:03d}": [float(k), k + 0.5] for k in range(300)})
    shown, errors = opened(browser, page.server.new_link())
    shown.select_option("#run", "before")
    wait_until(shown, "document.querySelectorAll('#metric-charts canvas').length === 24")
    assert "24 of 300" in shown.locator("#metrics-note").inner_text()
    shown.locator("#filter").fill("M299")
    wait_until(
        shown, "document.querySelector('#metric-charts')?.innerText.replace(/\\s+/g, ' ').trim() === 'm299 300'"
    )
    shown.locator("#filter").fill("no such")
    wait_until(shown, "document.querySelector('#metric-charts').innerText.includes('no metric has this')")
    assert [one for one in errors if "404" not in one] == []


def many(number: int) -> JobLook:
    """200 members, all of which changed."""
    members = tuple(
        MemberFigures(name=f"server-{k}", role="server", num_rounds=1, apply=0.001, state="working") for k in range(8)
    ) + tuple(
        MemberFigures(
            name=f"worker-{k}", role="worker", step=number, num_steps=1, compute=0.1, wait=0.01 * number,
            share=1 / 192, state="working", pid=k + 1, peers={f"server-{s}": 1e5 for s in range(8)},
        )
        for k in range(192)
    )  # fmt: skip
    return look(number, members=members)


def test_200_members_leave_the_page_usable(page: Served, browser: Any) -> None:
    """Rows stay where they are while looks come: a click that begins before a look and ends after it is one."""
    page.job.show(many(1))
    shown, errors = opened(browser, page.server.new_link())
    wait_until(shown, "document.querySelectorAll('#member-table tbody tr').length === 200")
    row = shown.locator("tr[data-member='worker-7']")
    row.scroll_into_view_if_needed()
    shown.evaluate("document.querySelector(\"tr[data-member='worker-7']\").isTheFirst = true")
    box = row.bounding_box()
    shown.mouse.move(box["x"] + 40, box["y"] + box["height"] / 2)
    shown.mouse.down()
    for number in range(2, 12):
        show(page, many(number))
        wait_until(
            shown,
            "[...document.querySelectorAll('#member-table tbody tr')].filter((one) => one.dataset.member.startsWith("
            f"'worker') && one.cells[4].textContent === '{number}').length === 192",
        )
    shown.mouse.up()
    wait_until(shown, "document.querySelector('tr.chosen')?.dataset.member === 'worker-7'")
    assert shown.evaluate("document.querySelector(\"tr[data-member='worker-7']\").isTheFirst")
    assert shown.locator("#event-list li").count() == 10, "no look after the first is lost"
    shown.locator("#member-table th", has_text="step time").click()
    shown.locator("#member-table th", has_text="member").click()
    names = shown.evaluate(
        "[...document.querySelectorAll('#member-table tbody tr')].map((one) => one.dataset.member)"
    )
    assert names == [f"server-{k}" for k in range(8)] + [f"worker-{k}" for k in range(192)]
    assert shown.locator("#splits .bar-row").count() == 192
    assert [one for one in errors if "404" not in one] == []

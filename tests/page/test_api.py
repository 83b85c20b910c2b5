"""The page over a real socket: who is refused, what is answered, and what slow and strange clients get."""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from tests.page.served import WAIT, Served, look, served
from tests.patience import PATIENCE

from syncline.core.media import Histogram, Image, MediaItem
from syncline.core.series import point
from syncline.errors import ConfigError
from syncline.page import serving
from syncline.page.hosts import hosts_of, page_hosts_of
from syncline.stats import JobLook, MemberFigures
from syncline.store.series import SeriesWriter

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

MEDIA = [
    MediaItem("shown", "image", 3, Image(np.zeros((4, 5))).content("shown")),
    MediaItem("weights", "histogram", 4, Histogram([1.0, 2.0]).content("weights")),
    MediaItem("said", "text", 5, b"<script>alert(1)</script>"),
]
ODD = 'a/b"<script>&name=ü'


@pytest.fixture
def page(tmp_path: pathlib.Path) -> Iterator[Served]:
    for name in ("now", "before"):
        (tmp_path / name).mkdir()
        writer = SeriesWriter(tmp_path / name / "series.db")
        points = [("loss", point(k, 1e9 + k, 1.0 / (k + 1))) for k in range(50)] + [(ODD, point(1, 1e9, 2.0))]
        facts = {"look": msgspec.json.encode(look(50, verdict="all ended well")), "settings": b'{"workers":2}'}
        for k in range(20):
            writer.write(1e9 + k, {"": {"step": k}, "worker-0": {"cores": 1.0}}, points if not k else (), facts)
        writer.write(1e9 + 20, {}, media=[(item, 1e9, "worker-0") for item in MEDIA])
        writer.close()
        (tmp_path / name / "events.jsonl").write_text(
            '{"number":1,"at":1.0,"step":0,"kind":"join","text":"x"}\n' + ("damage\n" if name == "before" else "")
        )
    (tmp_path / "no run").mkdir()
    with served(tmp_path) as found:
        yield found


# -- who is refused ---------------------------------------------------------------------------------------

EVERYTHING = (
    "/", "/app.js", "/style.css", "/uplot.js", "/api/v1/runs", "/api/v1/runs/now", "/api/v1/runs/now/rows",
    "/api/v1/runs/now/curves", "/api/v1/runs/now/events", "/api/v1/runs/now/media",
    "/api/v1/runs/now/media/1", "/api/v1/stream", "/api/v1/openapi.json", "/metrics",
    "/none",
)  # fmt: skip


def test_nothing_can_be_read_without_the_link(page: Served) -> None:
    page.job.show(look(1))
    wrong = [{}, {"Authorization": "Bearer " + "0" * 64}, {"Cookie": f"{page.server.access.cookie_name}=1.2.3"}]
    for path in EVERYTHING:
        for headers in wrong:
            status, _, body = page.get(path, headers)
            assert status == 401 and b"worker-0" not in body and b"loss" not in body, path
    assert page.get("/open?code=none", {})[0] == 401


def test_a_link_opens_it_once(page: Served) -> None:
    path = page.server.new_link().removeprefix(page.server.address)
    status, headers, _ = page.get(path, {})
    cookie = headers["set-cookie"]
    assert status == 200 and {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert page.get("/", {"Cookie": cookie.partition(";")[0]})[0] == 200
    assert page.get("/api/v1/stream", {"Cookie": cookie.partition(";")[0]}, "HEAD")[0] == 200
    assert page.get(path, {})[0] == 401, "a second time"


def test_other_sites_and_other_names_are_refused(page: Served) -> None:
    """A page elsewhere cannot read it, with the cookie neither; nor can a name that is made to mean this address."""
    for headers in (
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example"},
    ):
        for path in EVERYTHING:
            assert page.get(path, {**page.token, **headers})[0] == 403
    assert page.get("/", {**page.token, "Host": f"evil.example:{page.port}"})[0] == 421
    for own in (f"localhost:{page.port}", "LOCALHOST:8080", "localhost", "127.0.0.1:1", "[::1]:8080"):
        assert page.get("/", {**page.token, "Host": own})[0] == 200, "through a tunnel its port is another one"
    for other in ("localhost.evil.example:8080", "127.0.0.1.evil.example", "evil.example", "localhost:x", "", ":80"):
        assert page.get("/", {**page.token, "Host": other})[0] == 421, other
    status, headers, _ = page.get("/api/v1/runs", {**page.token, "Origin": page.server.address})
    assert status == 200 and not any(name.startswith("access-control") for name in headers)
    other_port = {**page.token, "Origin": "http://localhost:1", "Host": f"localhost:{page.port}"}
    assert page.get("/api/v1/runs", other_port)[0] == 403, "another server of the reader's own machine"


def test_a_proxy_gives_the_page_another_name(tmp_path: pathlib.Path) -> None:
    """Its readers ask for that name, and their cookie travels by TLS only; else no header of it is believed."""
    with served(tmp_path, page_hosts=["jobs.example.org, Other:8443", "third"]) as page:
        for name in ("jobs.example.org", "JOBS.example.org:443", "other:8443", "third:1", f"127.0.0.1:{page.port}"):
            assert page.get("/", {**page.token, "Host": name})[0] == 200, name
        for name in ("other:8444", "other", "evil.example", "x.jobs.example.org"):
            assert page.get("/", {**page.token, "Host": name})[0] == 421, name
        asked = {**page.token, "Origin": "https://jobs.example.org", "Host": f"127.0.0.1:{page.port}"}
        assert page.get("/api/v1/runs", asked)[0] == 200, "a proxy may send the address that it reaches the page by"
        assert page.get("/api/v1/runs", {**asked, "Origin": "https://evil.example"})[0] == 403
        assert "; Secure" in cookie_of(page, {"X-Forwarded-Proto": "https", "Host": "jobs.example.org"})
        assert "; Secure" not in cookie_of(page, {"Host": "jobs.example.org"})
    with served(tmp_path) as page:
        assert "; Secure" not in cookie_of(page, {"X-Forwarded-Proto": "https"}), "the browser would not send it"


def cookie_of(page: Served, headers: dict[str, str]) -> str:
    path = page.server.new_link().removeprefix(page.server.address)
    status, told, _ = page.get(path, headers)
    assert status == 200
    return told["set-cookie"]


@pytest.mark.parametrize("said", ["a b", "http://x", "x:", "x:y", "*", "a/b", "[::1"])
def test_a_wrong_name_of_a_proxy_is_refused(said: str) -> None:
    with pytest.raises(ConfigError, match="--page-host"):
        page_hosts_of([said])


def test_looking_at_a_link_does_not_use_it_up(page: Served) -> None:
    """Programs that pass links on ask for their head first: the reader came second, and was refused."""
    path = page.server.new_link().removeprefix(page.server.address)
    status, headers, _ = page.get(path, {}, "HEAD")
    assert status == 401 and "set-cookie" not in headers
    assert page.get(path, {})[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(page: Served, method: str) -> None:
    assert page.get("/api/v1/runs", method=method)[0] == 405
    assert page.get("/", method=method)[0] == 405


def test_every_answer_has_a_strict_policy(page: Served) -> None:
    for path in (*EVERYTHING, "/open?code=x"):
        if path == "/api/v1/stream":
            continue
        headers = page.get(path)[1]
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


# -- what is answered -------------------------------------------------------------------------------------


def test_runs_that_go_on_and_runs_that_have_ended(page: Served) -> None:
    page.job.show(look(3))
    told = page.json("/api/v1/runs")
    assert told["live"] == "now" and [one["name"] for one in told["runs"]] == ["now", "before"]
    now, before = page.json("/api/v1/runs/now"), page.json("/api/v1/runs/before")
    assert now["look"]["number"] == 3 and now["is_live"] and now["metrics"] == ["loss", ODD]
    assert before["look"]["figures"]["verdict"] == "all ended well" and before["settings"] == {"workers": 2}
    assert page.json("/api/v1/runs/now/rows?since=1000000015")["columns"] == {"step": [15, 16, 17, 18, 19]}
    assert page.json("/api/v1/runs/now/rows?member=worker-0")["columns"] == {"cores": [1.0] * 20}
    curve = page.json("/api/v1/runs/before/curves?name=loss&most=10")["curves"]["loss"]
    assert len(curve["step"]) == 10 and curve["high"][0] == 1.0
    odd = page.json("/api/v1/runs/now/curves?name=a%2Fb%22%3Cscript%3E%26name%3D%C3%BC&name=gone")["curves"]
    assert odd[ODD]["value"] == [2.0] and odd["gone"]["value"] == []


def test_media_are_served_as_what_they_are(page: Served) -> None:
    """A text is never read as a page: its type is plain, and browsers must not guess another."""
    told = page.json("/api/v1/runs/now/media")["media"]
    assert [(one["name"], one["kind"], one["step"], one["member"]) for one in told] == [
        (item.name, item.kind, item.step, "worker-0") for item in MEDIA
    ]
    kinds = []
    for one, item in zip(told, MEDIA, strict=True):
        status, headers, body = page.get(f"/api/v1/runs/now/media/{one['id']}")
        assert status == 200 and body == item.content and headers["x-content-type-options"] == "nosniff"
        kinds.append(headers["content-type"])
    assert kinds == ["image/png", "application/json", "text/plain; charset=utf-8"]


def test_a_damaged_event_file_is_shown_up_to_the_damage(page: Served) -> None:
    told = page.json("/api/v1/runs/before/events")
    assert [one["text"] for one in told["events"]] == ["x"] and "line 2" in told["damage"]
    assert page.json("/api/v1/runs/now/events?after=1") == {"events": [], "damage": ""}


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/v1/runs/other", 404, "there is no run other"),
        ("/api/v1/runs/no%20run", 404, "is a folder, but no run"),
        ("/api/v1/runs/no%20run/events", 404, "is a folder, but no run"),
        ("/api/v1/runs/%2e%2e", 404, ""),
        ("/api/v1/runs/..%2fnow", 404, ""),
        ("/api/v1/runs/%00", 404, "no name of a run"),
        ("/api/v1/runs/" + "x" * 300, 404, "no name of a run"),
        ("/api/v1/runs/now/rows?since=nan", 400, "since"),
        ("/api/v1/runs/now/rows?since=-1", 400, "since"),
        ("/api/v1/runs/now/curves?most=1", 400, "most"),
        ("/api/v1/runs/now/curves?most=1e9", 400, "most"),
        ("/api/v1/runs/now/curves?" + "name=x&" * 65, 400, "at most 64"),
        ("/api/v1/runs/now/events?after=x", 400, "after"),
        ("/api/v1/runs/now/media/99", 404, "now has no media of id 99"),
        ("/api/v1/runs/now/media/x", 400, "id: give a number"),
        ("/api/v1/runs/now/media/-1", 400, "id: give a number"),
        ("/api/v1/runs/other/media", 404, "there is no run other"),
        ("/api/v1/nothing", 404, "openapi.json"),
        ("/style.css/..", 404, ""),
        ("/static/../../pyproject.toml", 404, ""),
    ],
)
def test_what_is_asked_wrongly_says_why(page: Served, path: str, status: int, words: str) -> None:
    found, _, body = page.get(path)
    assert found == status and words in json.loads(body)["error"]


def test_a_damaged_series_says_so(page: Served, tmp_path: pathlib.Path) -> None:
    (tmp_path / "before" / "series.db").write_bytes(b"x" * 10_000)
    status, _, body = page.get("/api/v1/runs/before/rows")
    assert status == 422 and "cannot be used" in json.loads(body)["error"]
    assert page.get("/api/v1/runs")[0] == 200


def test_the_description_fits_the_routes(page: Served) -> None:
    told = page.json("/api/v1/openapi.json")
    for path in told["paths"]:
        answer = page.get(path.replace("{run}", "now").replace("{id}", "1"), method="HEAD")
        assert answer[0] == 200, path
    assert "JobFigures" in told["components"]["schemas"]


def test_prometheus_can_read_the_metrics(page: Served) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    assert page.get("/metrics")[2] == b"# EOF\n"
    page.job.show(look(3, readings={"loss": 0.5, 'odd"\n\\name': 1.0}, waits=(WAIT,)))
    status, headers, body = page.get("/metrics")
    assert status == 200 and headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    values = {(sample.name, *sample.labels.values()): sample.value for f in families.values() for sample in f.samples}
    assert values[("syncline_steps_total",)] == 3 and values[("syncline_metric", 'odd"\n\\name')] == 1.0
    assert values[("syncline_members", "worker")] == 1 and values[("syncline_longest_wait_seconds",)] == 2.0
    assert values[("syncline_member_step_seconds", "worker-0", "compute")] == 0.1
    assert values[("syncline_verdict", "straggler", "worker-0")] == 1
    totals = ("member_sent_bytes", "member_received_bytes", "member_cpu_seconds", "worker_samples")
    assert [values[(f"syncline_{name}_total", "", "worker-0", "worker")] for name in totals] == [30, 60, 1.5, 90]
    assert ("syncline_worker_samples_total", "", "server-0", "server") not in values
    assert all(families[f"syncline_{name}"].type == "counter" for name in totals), "what rate() needs"
    assert values[("syncline_staleness_updates_bucket", "1.0")] == 7
    busy = [sample.labels["member"] for sample in families["syncline_member_gpu_busy_ratio"].samples]
    assert busy == [], "what is not known is no zero"
    gpu = MemberFigures(name="worker-1", role="worker", gpu_bytes=5, gpu_busy=0.75)
    page.job.show(look(4, members=(gpu, MemberFigures(name="worker-2", role="worker"))))
    told = page.get("/metrics")[2].decode()
    assert 'syncline_member_gpu_busy_ratio{host="",member="worker-1",role="worker"} 0.75' in told
    assert told.count("syncline_member_gpu_busy_ratio{") == 1


def test_the_whole_page_is_light(page: Served) -> None:
    """Under 300 kB, and every file that the page asks for is there."""
    import re

    from syncline.page.application import FILES

    total, named = 0, set[str]()
    for path in FILES:
        status, _, body = page.get(path)
        assert status == 200, path
        total += len(body)
        if not path.startswith("/uplot"):
            named |= set(re.findall(r"""["'](/[a-z-]+\.(?:js|css|svg))["']""", body.decode()))
    assert total < 300_000 and named <= set(FILES) and len(named) > 7


# -- looks as they come -----------------------------------------------------------------------------------


def test_a_stream_has_each_look(page: Served) -> None:
    page.job.show(look(1))
    connection = page.connection()
    connection.request("GET", "/api/v1/stream", headers=page.token)
    answer = connection.getresponse()
    assert answer.getheader("content-type", "").startswith("text/event-stream")

    def next_look() -> JobLook:
        while not (line := answer.readline()).startswith(b"data: "):
            assert line, "the stream has ended"
        return msgspec.json.decode(line[6:], type=JobLook)

    assert next_look().number == 1
    for number in range(2, 6):
        page.job.show(look(number))
        found = next_look()
        assert found.number == number and found.events[0].text == "<b>x</b>"
    connection.close()
    until = time.monotonic() + PATIENCE
    while page.job.watchers and time.monotonic() < until:
        page.job.show(look(9))  # a stream that is gone is noticed when something is sent
        time.sleep(0.02)
    assert not page.job.watchers, "nobody looks: nothing is encoded"


def test_a_browser_that_does_not_read_holds_up_nobody(page: Served) -> None:
    """It connects and never reads. The job shows its looks at full speed, and others get theirs."""
    sleepy = page.connection()
    sleepy.request("GET", "/api/v1/stream", headers=page.token)
    until = time.monotonic() + PATIENCE
    while not page.job.watchers and time.monotonic() < until:
        time.sleep(0.01)
    large = "x" * 100_000
    for number in range(1, 300):
        page.job.show(look(number, why=large))  # 30 MB: more than any buffer holds
    assert page.json("/api/v1/runs/now")["look"]["number"] == 299
    sleepy.close()


def test_streams_are_bounded(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.page import application

    monkeypatch.setattr(application, "MOST_STREAMS", 1)
    page.job.show(look(1))
    first = page.connection()
    first.request("GET", "/api/v1/stream", headers=page.token)
    first.getresponse().readline()
    assert page.get("/api/v1/stream")[0] == 503
    first.close()


# -- connections of strangers -----------------------------------------------------------------------------


def is_closed(sock: socket.socket) -> bool:
    """By the page. What it has answered before is read over."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def until_so(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_idle_connections_of_strangers_do_not_close_the_page(page: Served) -> None:
    """Other users of the machine can connect and say nothing. Readers still get answers; few descriptors are held."""
    from syncline.page.connections import MOST_CONNECTIONS, MOST_STRANGERS

    held: list[socket.socket] = []
    reader = page.connection()
    reader.request("GET", "/api/v1/stream", headers=page.token)
    stream = reader.getresponse()
    try:
        for _ in range(2 * MOST_CONNECTIONS):
            held += [socket.create_connection((page.host, page.port), timeout=PATIENCE)]
        assert page.get("/api/v1/runs")[0] == 200
        until_so(lambda: sum(is_closed(sock) for sock in held) >= len(held) - MOST_STRANGERS)
        assert page.get("/", {})[0] == 401
        page.job.show(look(1))
        while not stream.readline().startswith(b"data: "):
            pass  # the stream of a reader is no stranger's: it is still there
    finally:
        reader.close()
        for sock in held:
            sock.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_connection_without_a_request_is_closed(page: Served, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """Also one on which a request drips in: bytes alone do not move the deadline."""
    from syncline.page import connections

    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.5)
    with socket.create_connection((page.host, page.port), timeout=PATIENCE) as sock:
        sock.sendall(said)

        def drip() -> bool:
            with contextlib.suppress(OSError):
                sock.send(b"x" if said else b"")
            return is_closed(sock)

        until_so(drip)


def test_a_second_request_has_a_deadline_too(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was let in is closed when its next request stays half; a stream is left alone."""
    from syncline.page import connections

    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.5)
    reader = page.connection()
    reader.request("GET", "/api/v1/stream", headers=page.token)
    stream = reader.getresponse()
    connection = page.connection()
    connection.request("GET", "/api/v1/runs", headers=page.token)
    assert connection.getresponse().read()
    sock = connection.sock

    def drip() -> bool:
        with contextlib.suppress(OSError):
            sock.send(b"GET / HTTP/1.1\r\n" if not num_sent else b"X: y\r\n")
        num_sent.append(1)
        return is_closed(sock)

    num_sent: list[int] = []
    until_so(drip)
    page.job.show(look(1))
    while not (line := stream.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    connection.close()
    reader.close()


# -- where it listens -------------------------------------------------------------------------------------


def test_where_the_page_listens() -> None:
    for where in ("auto", "0", "127.0.0.1", "127.0.0.1:0", "[::1]:0"):
        sock = serving.listen(where)
        try:
            assert sock.getsockname()[0] in ("127.0.0.1", "::1")
            assert hosts_of(sock).allows(serving.address_of(sock).removeprefix("http://"))
        finally:
            sock.close()
    for where in ("x:y", "127.0.0.1:99999", "1:2:x", "-1"):
        with pytest.raises(ConfigError):
            serving.listen(where)


def test_a_used_port_is_said() -> None:
    sock = serving.listen("auto")
    port = str(sock.getsockname()[1])
    for option in ("--page", "--at"):
        with pytest.raises(ConfigError, match=f"{port}: .*choose another port with {option}"):
            serving.listen(port, option)
    sock.close()


def test_a_port_is_waited_for_that_is_given_up() -> None:
    """Where torchrun starts all ranks again, the job before may still have its page."""
    sock = serving.listen("auto")
    timer = threading.Timer(0.3, sock.close)
    timer.start()
    again = serving.listen(str(sock.getsockname()[1]), seconds=PATIENCE)
    timer.join()
    assert sock.fileno() == -1
    again.close()

"""The page that tries a model, in a real Chromium; `make test-serve`.

SYNCLINE_PICTURES=DIR leaves pictures there: phone and desktop, light and dark.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE
from tests.serve.saved import MODEL, save

from syncline.serve import Server
from syncline.serve.control import ControlRequest, ask, folder_of

pytestmark = pytest.mark.clients

#: Says which quarter of a picture is the brightest; a row of FP32 in 0 … 1.
IMAGES = """
import torch
from torch import nn

class Net(nn.Module):
    def forward(self, image):
        parts = [image[..., y : y + 14, x : x + 14].mean((1, 2, 3)) for y in (0, 14) for x in (0, 14)]
        return {"scores": torch.stack(parts, 1), "largest": image.amax((1, 2, 3)), "negative": 1 - image}

example = {"image": torch.zeros(1, 1, 28, 28)}
labels = ["top left", "top right", "bottom left", "bottom right"]
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield found
        found.close()


def serving(folder: pathlib.Path, source: str, weights: Any = None, **settings: Any) -> Any:
    (folder / "shown.py").write_text(source)
    return Server(f"{folder / 'shown.py'}:Net", weights, port=0, refresh=0.0, runs=str(folder / "runs"), **settings)


def opened(browser: Any, url: str, **settings: Any) -> tuple[Any, list[str]]:
    """A page in a fresh profile; what its console says against it; and every address that it asked."""
    page = browser.new_context(**settings).new_page()
    page.set_default_timeout(1e3 * PATIENCE)
    troubles: list[str] = []
    page.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(url) else troubles.append(asked.url))
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    return page, troubles


def wait_until(page: Any, expression: str) -> None:
    """The page's own policy forbids the evaluation that playwright waits by."""
    until = time.monotonic() + PATIENCE
    while not page.evaluate(expression):
        assert time.monotonic() < until, (expression, page.inner_text("body"))
        time.sleep(0.05)


def picture(folder: pathlib.Path, bright: tuple[int, int]) -> pathlib.Path:
    """A black PNG of 28 x 28 whose one quarter is white."""
    rows = [bytes([0] + [255 * ((y // 14, x // 14) == bright) for x in range(28)]) for y in range(28)]
    parts = b""
    for kind, data in (
        (b"IHDR", struct.pack(">IIBBBBB", 28, 28, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(rows))),
        (b"IEND", b""),
    ):
        parts += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    path = folder / "quarter.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    return path


def test_a_picture_gets_its_label(tmp_path: pathlib.Path, browser: Any) -> None:
    """Chosen from a file and drawn by hand: what the model gets is what is shown."""
    with serving(tmp_path, IMAGES) as server:
        page, troubles = opened(browser, server.url, viewport={"width": 1280, "height": 900})
        page.locator("input[type=file]").set_input_files(picture(tmp_path, (1, 0)))
        wait_until(
            page,
            "document.querySelector('canvas.seen').getContext('2d').getImageData(5, 20, 1, 1).data[0] === 255",
        )
        page.locator("#send").click()
        wait_until(page, "document.querySelector('#outputs .label')?.textContent === 'bottom left'")
        answer = json.loads(page.locator("#raw pre").text_content())
        assert answer["output"]["scores"] == [0, 0, 1, 0] and answer["output"]["largest"] == 1
        second = page.locator("#outputs .output:nth-child(2) .label").inner_text()
        assert second == "1", "a number is no class"
        assert page.locator("#outputs canvas").count() == 1, "an output that is a picture is shown as one"
        assert "version 1" in page.locator("#by").inner_text()
        page.get_by_role("button", name="Clear").click()
        box = page.locator("canvas.pad").bounding_box()
        page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.2 * box["height"])
        page.mouse.down()
        page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.3 * box["height"], steps=4)
        page.mouse.up()
        page.locator("#send").click()
        wait_until(page, "document.querySelector('#outputs .label').textContent === 'top right'")
        wait_until(page, "document.querySelector('#tiles').textContent.includes('2 batches')")
        page.get_by_role("button", name="As numbers").click()
        page.locator("textarea").fill(", ".join(["0"] * 392 + ["1"] * 392))
        page.locator("#send").click()
        wait_until(page, "document.querySelector('#outputs .label').textContent === 'bottom left'")
        assert troubles == []
        pictures(browser, server.url, tmp_path)


def pictures(browser: Any, url: str, folder: pathlib.Path) -> None:
    """At each width nothing makes the page scroll sideways."""
    out = os.environ.get("SYNCLINE_PICTURES", "")
    for name, width, height in (("phone", 390, 844), ("desktop", 1280, 900)):
        for scheme in ("light", "dark"):
            size = {"width": width, "height": height}
            page, troubles = opened(browser, url, viewport=size, color_scheme=scheme)
            page.locator("input[type=file]").set_input_files(picture(folder, (0, 1)))
            wait_until(
                page,
                "document.querySelector('canvas.seen').getContext('2d').getImageData(20, 5, 1, 1).data[0] === 255",
            )
            page.locator("#send").click()
            wait_until(page, "document.querySelector('#outputs .label')?.textContent === 'top right'")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert troubles == []
            if out:
                page.screenshot(path=f"{out}/{name}-{scheme}.png", full_page=True)
            page.context.close()


def test_numbers_versions_and_refusals(tmp_path: pathlib.Path, browser: Any) -> None:
    for number in (1, 2):
        save(tmp_path / "saves", number)
        if number == 1:
            server = serving(tmp_path, MODEL, tmp_path / "saves").start()
    try:
        page, troubles = opened(browser, server.url)
        page.locator("textarea").fill("1, 1 1;1")
        page.locator("#send").click()
        wait_until(page, "document.querySelector('#outputs .score.top')?.textContent.includes('5')")
        ask(folder_of(server.config.runs, server.name), ControlRequest("load"))
        wait_until(page, "document.querySelectorAll('#versions tbody tr').length === 2")
        page.locator("#send").click()
        wait_until(page, "document.querySelector('#by').textContent.includes('version 2')")
        page.locator("#version").select_option("1")
        page.locator("#send").click()
        wait_until(page, "document.querySelector('#by').textContent.includes('version 1')")
        assert troubles == []
        page.locator("textarea").fill("1, 1, x, 1")
        page.locator("#send").click()
        wait_until(page, "document.querySelector('#notices').textContent.includes('is not a number')")
        page.locator("textarea").fill("1, 1, 1")
        assert "3 of 4 numbers" in page.locator(".hint.bad").inner_text()
        page.locator("#send").click()
        wait_until(page, "document.querySelector('#notices').textContent.includes('needs 4')")
    finally:
        server.close()
    wait_until(page, "document.querySelector('#state').textContent === 'no answer'")


def test_a_token_is_asked_for(tmp_path: pathlib.Path, browser: Any) -> None:
    with serving(tmp_path, IMAGES, host="0.0.0.0") as server:
        page, _ = opened(browser, server.url.replace("0.0.0.0", "127.0.0.1"))
        assert page.locator("#try").is_hidden()
        page.locator("#token").fill("x" * 20)
        page.locator("#token-form button").click()
        wait_until(page, "document.querySelector('#notices').textContent.includes('does not take this token')")
        page.locator("#token").fill(server.token)
        page.locator("#token-form button").click()
        wait_until(page, "document.querySelector('#state').textContent === 'answers'")
        page.locator("#send").click()
        wait_until(page, "document.querySelector('#outputs .label') !== null")
        assert server.token not in page.content() and "token" not in page.url
        page.locator("footer a[href='/openapi.json']").click()  # a link by itself would send no token
        page.wait_for_url("blob:**", timeout=1000 * PATIENCE)
        assert '"openapi":"3.1.0"' in page.locator("body").inner_text()

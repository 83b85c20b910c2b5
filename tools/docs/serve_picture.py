"""Pictures of the page of `syncline serve` for the docs, in a real Chromium: serve_picture.py FOLDER

The model knows the digits of a font of 5 by 7, and a seven is drawn by hand.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
import tempfile
import time
import urllib.request
from typing import Any

from playwright.sync_api import sync_playwright

from syncline.serve import Server

MODEL = """
import torch
from torch import nn
from torch.nn import functional

FONT = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111", "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)


def digits():
    rows = torch.tensor([[[float(bit) for bit in line] for line in one.split()] for one in FONT])
    large = functional.interpolate(rows[:, None], scale_factor=3, mode="bilinear")
    return functional.normalize(functional.pad(large, (6, 7, 3, 4)).flatten(1))


class Digits(nn.Linear):
    def __init__(self):
        super().__init__(784, 10)
        self.weight.data, self.bias.data = 30 * digits(), torch.zeros(10)

    def forward(self, image):
        return {"digit": super().forward(functional.normalize(image.flatten(1))).softmax(1)}


example = {"image": torch.zeros(1, 1, 28, 28)}
labels = [*"0123456789"]
"""
SECONDS = 60.0
NUM_REQUESTS = 400
#: Of the pad: where a seven is drawn, in parts of its side.
SEVEN = ((0.26, 0.18), (0.7, 0.18), (0.42, 0.84))
#: Name of a picture -> size and colours.
PICTURES = {
    "serve-light": ((1280, 900), "light"),
    "serve-phone-dark": ((390, 844), "dark"),
}


def main(folder: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = pathlib.Path(place) / "digits.py"
        path.write_text(MODEL)
        with Server(f"{path}:Digits", port=0, name="digits", runs=place) as server:
            body = json.dumps({"input": [[[0.0] * 27 + [0.5]] * 28]}).encode()
            for _ in range(NUM_REQUESTS):
                with urllib.request.urlopen(f"{server.url}/predict", body) as reply:
                    reply.read()
            take(folder, server.url)


def take(folder: pathlib.Path, url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, ((width, height), colours) in PICTURES.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=colours)
            page = context.new_page()
            page.goto(url)
            page.wait_for_selector("body[data-ready]", timeout=1e3 * SECONDS)
            draw(page)
            page.locator("#send").click()
            page.wait_for_selector("#outputs .label", timeout=1e3 * SECONDS)
            time.sleep(2.0)  # one more look at latency and queue
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=str(folder / f"{name}.png"), full_page=name.startswith("serve-phone"))
            context.close()
        browser.close()


def draw(page: Any) -> None:
    pad = page.locator("canvas.pad")
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    for number, (x, y) in enumerate(SEVEN):
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=12)
        if not number:
            page.mouse.down()
    page.mouse.up()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

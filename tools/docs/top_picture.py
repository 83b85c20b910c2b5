"""A picture of `syncline top` for the docs, of a job that runs: python tools/docs/top_picture.py JOB runs OUT.png

The view is the real one, with looks of the real job; textual draws it as SVG, and Chromium makes a PNG of that.
"""

from __future__ import annotations

import asyncio
import functools
import pathlib
import re
import shutil
import sys
import tempfile

from playwright.sync_api import sync_playwright

from syncline.launch.folder import find_job
from syncline.top.app import Top
from syncline.top.looking import Looking

SECONDS = 300.0
SIZE = (132, 22)


def draw(job: str, runs: pathlib.Path) -> str:
    """The view after some looks, as SVG that loads nothing."""
    file = find_job(job, runs)
    app = Top(job, functools.partial(Looking, file), file.folder)

    async def watch() -> str:
        async with app.run_test(size=SIZE) as pilot:
            deadline = asyncio.get_running_loop().time() + SECONDS
            while asyncio.get_running_loop().time() < deadline:
                await pilot.pause(0.2)
                if max(map(len, app.history.values()), default=0) >= 20:
                    break
            await pilot.press(*"sssss")
            return app.export_screenshot(title=f"syncline top {job}")

    svg = re.sub(r"@font-face\s*{[^}]*}", "", asyncio.run(watch()))
    return svg.replace("Fira Code", "DejaVu Sans Mono")


def main(job: str, runs: str, out: str) -> None:
    svg = draw(job, pathlib.Path(runs))
    with tempfile.TemporaryDirectory() as place, sync_playwright() as engine:
        path = pathlib.Path(place) / "top.html"
        path.write_text(f'<meta charset="utf-8"><body style="margin:0;width:1200px">{svg}')
        browser = engine.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.goto(path.as_uri())
        page.locator("svg").first.screenshot(path=out)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

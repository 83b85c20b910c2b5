"""Reports in a real Chromium: nothing is loaded or run, nothing is cut off, light and dark. `make test-page`."""

from __future__ import annotations

import pathlib
import shutil

import pytest
from tests.report.made import NASTY, make_run

from syncline.report.reading import read_run
from syncline.report.several import comparison_page
from syncline.report.single import report

pytestmark = pytest.mark.page

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.mark.parametrize("size", SIZES)
def test_reports_in_a_browser(tmp_path: pathlib.Path, size: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    one = read_run(make_run(tmp_path / "one", metrics=("loss", NASTY), text=NASTY, policy="async"))
    two = read_run(make_run(tmp_path / f"two-{'x' * 90}", metrics=("loss",), rate=0.02))
    pages = {"one": report(one), "both": comparison_page([one, two])}
    width, height = SIZES[size]
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            for name, text in pages.items():
                path = tmp_path / f"{name}.html"
                path.write_text(text)
                colors = {}
                for scheme in ("light", "dark"):
                    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                    asked: list[str] = []
                    said: list[str] = []
                    page.on("request", lambda request, asked=asked: asked.append(request.url))
                    page.on("console", lambda message, said=said: said.append(message.text))
                    page.on("dialog", lambda dialog, said=said: (said.append(dialog.message), dialog.dismiss()))
                    page.goto(path.as_uri())
                    assert asked == [path.as_uri()] and said == []
                    assert page.evaluate("document.documentElement.scrollWidth") <= width, "wider than the screen"
                    shown = page.inner_text("body")
                    assert "loss" in shown and (NASTY in shown) and "Made by syncline" in shown
                    assert page.locator("path.line").count() >= 3
                    box = page.locator("figure.chart svg").first.bounding_box()
                    assert box is not None and box["width"] > 200 and box["height"] > 100
                    colors[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
                    page.close()
                assert len(set(colors.values())) == 2, colors
        finally:
            browser.close()

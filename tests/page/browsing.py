"""Pages in a real Chromium."""

from __future__ import annotations

import time
from typing import Any

from tests.patience import PATIENCE


def opened(browser: Any, link: str, **settings: Any) -> tuple[Any, list[str]]:
    """A page in a fresh profile, and what its console says against it."""
    page = browser.new_context(**settings).new_page()
    page.set_default_timeout(1e3 * PATIENCE)
    errors: list[str] = []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(link)
    page.wait_for_selector("body[data-ready]", timeout=1e3 * PATIENCE)
    return page, errors


def wait_until(page: Any, expression: str) -> None:
    """The page's own policy forbids the evaluation that playwright waits by."""
    until = time.monotonic() + PATIENCE
    while not page.evaluate(expression):
        assert time.monotonic() < until, expression
        time.sleep(0.05)

"""A browser without a window, for the tests of pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def find_browser() -> str | None:
    """Return the path of Chromium, or of a browser made from it; None: there is none."""
    found = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    return next((path for path in found if path is not None), None)


@contextlib.contextmanager
def running_browser() -> Iterator[Any]:
    """Start a browser; skip the test where playwright or Chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = find_browser()
    if path is None:
        pytest.skip("needs chromium: tests/support/apt.sh chromium=chromium installs it")
    with playwright.sync_playwright() as started:
        # Root has no sandbox.
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Any, path: Path, *, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """Open a page; whatever it asks for beside itself, and each error, fails the test."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.goto(path.as_uri())
    try:
        yield page
        assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()] and wrong == []
    finally:
        page.close()


def loading_ms(page: Any) -> float:
    """Milliseconds from the request of a page until it was loaded."""
    found: float = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    return found


def press_until(page: Any, key: str, selector: str, most: int = 120) -> None:
    """Press a key until what has the focus matches."""
    for _ in range(most):
        page.keyboard.press(key)
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    pytest.fail(f"{key} does not reach {selector}")


def text(page: Any, selector: str) -> str:
    """The text of the first element that is found."""
    found: str = page.locator(selector).first.inner_text()
    return found


def walk_to_a_token(page: Any) -> None:
    """Go to the first token of the report's first response by keyboard; the page must tell of it."""
    press_until(page, "Tab", ".response")
    page.keyboard.press("ArrowRight")
    assert text(page, ".token-told").startswith("token 1 of response 0")

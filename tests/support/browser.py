"""A browser without a window, for the tests of pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
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

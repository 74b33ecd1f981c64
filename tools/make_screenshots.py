#!/usr/bin/env python3
"""Make the pictures of README and docs from a real run: console and report.

The run is `hybridflow train quickstart` on this machine, in a terminal of its own; settings may follow. It is kept in
build/screenshots. Needs `pip install --editable '.[docs]'` and Chromium.

Examples:
  python tools/make_screenshots.py
  python tools/make_screenshots.py --out /tmp/pictures trainer.steps=4 warm_start.steps=50

Exit status: 0 done, 1 the run failed or a picture is larger than 150 KB, 2 something is not installed.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER, RUN_DIR = ROOT / "build" / "screenshots", "runs/quickstart"
MAX_BYTES = 150_000
COLUMNS, FIRST_LINES, LAST_LINES = 100, 14, 16
_PROGRAM = (sys.executable, "-m", "hybridflow")


def run_in_terminal(command: Sequence[str]) -> tuple[int, str]:
    """Run a command whose output is a terminal, and print what it writes.

    Returns:
        Its exit status, and all that it wrote.
    """
    os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    written = bytearray()

    def read(descriptor: int) -> bytes:
        part = os.read(descriptor, 1 << 16)
        written.extend(part)
        return part

    status = pty.spawn(list(command), read)
    return os.waitstatus_to_exitcode(status), written.decode("utf-8", errors="replace")


def lines_of(written: str) -> list[str]:
    """Return the lines that are left on a terminal: a line that was begun anew counts from there. Colors stay."""
    lines = [re.split(r"\r", line.rstrip("\r"))[-1] for line in written.split("\n")]
    # All but colors: erased lines, titles of windows.
    kept = [re.sub(r"\x1b\[[0-9;?]*[A-LN-Za-ln-z]|\x1b\][^\x07]*\x07", "", line) for line in lines]
    return [line for line in kept if line.strip()]


def console_picture(title: str, lines: Sequence[str]) -> str:
    """Return lines of a terminal as SVG, of which the middle is left out if there are many."""
    from rich.console import Console
    from rich.text import Text

    if len(lines) > FIRST_LINES + LAST_LINES:
        lines = [*lines[:FIRST_LINES], "…", *lines[-LAST_LINES:]]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="standard")
        for line in lines:
            console.print(Text.from_ansi(line), soft_wrap=False)
        # The faces would be loaded from another host.
        return re.sub(r"@font-face\s*\{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)


def page_picture(page: Path, picture: Path, *, part: str = "", dark: bool = False) -> None:
    """Write what a browser shows of a page, from one of its parts on, as PNG."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=arguments)
        tab = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="dark" if dark else "light")
        tab.goto(f"{page.resolve().as_uri()}{part}")
        tab.wait_for_timeout(1000)
        tab.screenshot(path=picture)
        browser.close()


def save_small(source: Path, picture: Path) -> None:
    """Write a picture as PNG of few colors, and no wider than pages show it."""
    from PIL import Image

    with Image.open(source) as image:
        image.thumbnail((1200, 1200))
        image.convert("RGB").quantize(128).save(picture, optimize=True)


def missing() -> str:
    """Return what is not installed, in words; empty if all is."""
    for package in ("rich", "playwright"):
        try:
            __import__(package)
        except ImportError:
            return f"{package} is not installed; install it with: pip install --editable '.[docs]'"
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return "there is no Chromium; install the package chromium"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, run, make pictures."""
    summary, _, rest = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", metavar="DIR", help="of the pictures")
    parser.add_argument("settings", nargs="*", help="of the run, dotted.key=value")
    options = parser.parse_args(argv)
    if found := missing():
        print(f"make_screenshots: {found}", file=sys.stderr)
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    os.chdir(FOLDER)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = ["train", "quickstart", *options.settings]
    status, written = run_in_terminal([*_PROGRAM, *command, f"run_dir={RUN_DIR}"])
    if status or subprocess.run([*_PROGRAM, "report", RUN_DIR], check=False).returncode:
        print("make_screenshots: the run or its report failed, see above", file=sys.stderr)
        return 1
    title = " ".join(["hybridflow", *command])
    (out / "console.svg").write_text(console_picture(title, lines_of(written)), encoding="utf-8")
    run = FOLDER / RUN_DIR
    page_picture(run / "report.html", run / "report.png")
    page_picture(run / "report.html", run / "report_step.png", part="#step", dark=True)
    for name in ("report.png", "report_step.png"):
        save_small(run / name, out / name)
    sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    print(*(f"{out / name}: {size / 1000:.0f} KB" for name, size in sizes.items()), sep="\n")
    return int(max(sizes.values()) > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())

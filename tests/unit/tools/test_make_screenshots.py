"""Pictures of a terminal and of a page: what is on them, and that they ask no other host for anything."""

import sys
import xml.etree.ElementTree as ElementTree

import make_screenshots
import pytest
from make_screenshots import (
    COLUMNS,
    FIRST_LINES,
    LAST_LINES,
    console_picture,
    lines_of,
    page_picture,
    run_in_terminal,
    save_small,
)
from PIL import Image


def text_of(svg):
    return "\n".join(
        "".join(part.itertext()) for part in ElementTree.fromstring(svg).iter() if part.tag.endswith("text")
    )


def test_lines_are_those_that_are_left_on_the_screen():
    written = "one\r\n\x1b[2mstep 1 of 9\x1b[0m\r\x1b[2K\x1b[1mtwo\x1b[0m\r\n\r\n\x1b]0;title\x07three\r\nlive\r\x1b[2K"
    assert lines_of(written) == ["one", "\x1b[1mtwo\x1b[0m", "three"]


def test_picture_of_a_console_has_its_text_and_colors_and_loads_nothing():
    pytest.importorskip("rich")
    svg = console_picture("hybridflow train", ["plain \\[b]", "\x1b[1;33mwarning\x1b[0m", "step 1/30 | reward 0.5"])
    text = text_of(svg).replace("\xa0", " ")
    assert (
        "plain \\[b]" in text and "warning" in text and "step 1/30 | reward 0.5" in text and "hybridflow train" in text
    )
    assert "font-weight: bold" in svg and "http" not in svg.replace("http://www.w3.org/2000/svg", "").replace(
        "https://www.textualize.io", ""
    )


def test_the_middle_of_a_long_console_is_left_out():
    pytest.importorskip("rich")
    text = text_of(console_picture("t", [f"line<{number}>" for number in range(100)]))
    assert [
        f"line<{number}>" in text for number in (0, FIRST_LINES - 1, FIRST_LINES, 99 - LAST_LINES, 100 - LAST_LINES, 99)
    ] == [*(True, True, False, False, True, True)]


def test_the_command_sees_a_terminal_of_this_width(monkeypatch, capfd):
    for name in ("COLUMNS", "LINES", "TERM"):
        monkeypatch.setenv(name, "")
    program = "import os, shutil; print(os.isatty(1), shutil.get_terminal_size().columns); raise SystemExit(3)"
    status, written = run_in_terminal([sys.executable, "-c", program])
    assert status == 3 and written == f"True {COLUMNS}\r\n"


@pytest.mark.slow
def test_picture_of_a_page(tmp_path):
    if missing := make_screenshots.missing():
        pytest.skip(missing)
    page = tmp_path / "page.html"
    style = "@media (prefers-color-scheme: dark) {body {background: #000}} div {height: 2000px} #end {background: #00f}"
    page.write_text(f"<style>{style}</style><div>top</div><div id=end>end</div>")
    corners = {}
    for name, part, dark in (("light", "", False), ("dark", "", True), ("end", "#end", False)):
        page_picture(page, tmp_path / f"{name}.png", part=part, dark=dark)
        with Image.open(tmp_path / f"{name}.png") as image:
            corners[name] = image.convert("RGB").getpixel((600, 450))
    assert corners == {"light": (255, 255, 255), "dark": (0, 0, 0), "end": (0, 0, 255)}


def test_pictures_are_made_small(tmp_path):
    Image.effect_noise((1430, 975), 50).convert("RGBA").save(tmp_path / "large.png")
    save_small(tmp_path / "large.png", tmp_path / "small.png")
    with Image.open(tmp_path / "small.png") as image:
        assert image.size == (1200, 818) and image.mode == "P"

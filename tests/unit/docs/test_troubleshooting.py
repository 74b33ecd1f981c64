"""Every text that the page about errors is keyed by stands in the source."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^### `(.+)`$", PAGE, flags=re.MULTILINE)
GAP = "…"


def texts(tree):
    """The strings of a module, with ``…`` for each value that is put into one."""
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
            inner |= {id(part) for part in node.values}
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


@functools.cache
def source_texts():
    """All of them; read when a test asks, as every process of the suite imports this file."""
    return list(sources())


def sources():
    for folder in ("hybridflow", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from texts(ast.parse(path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "slurm").glob("*.s*")):
        yield from path.read_text(encoding="utf-8").splitlines()


def stands(quoted, lines):
    """Whether one of the lines has all parts of a quotation, one behind the other."""
    parts = [part for part in quoted.split(GAP) if part.strip()]
    pattern = re.compile(".*?".join(map(re.escape, parts)), flags=re.DOTALL)
    return any(pattern.search(line) for line in lines)


@pytest.mark.parametrize("quoted", QUOTED)
def test_quoted_text_stands_in_the_source(quoted):
    assert len(quoted.replace(GAP, "").strip()) >= 12, "too short to find anything by"
    assert stands(quoted, source_texts()), f"no message of hybridflow reads {quoted!r}"


def test_quotations_that_do_not_stand_there_are_found_out():
    lines = source_texts()
    assert stands("ranks did not come within … s", lines) and not stands("ranks did not come inside … s", lines)
    assert not stands("did not come within … ranks", ["5 ranks did not come within 3 s"])


def test_every_heading_is_a_quotation_with_something_to_do():
    sections = re.split(r"^#{2,3} ", PAGE, flags=re.MULTILINE)
    assert len(re.findall(r"^### ", PAGE, flags=re.MULTILINE)) == len(QUOTED) > 40 and len(set(QUOTED)) == len(QUOTED)
    assert all(section.partition("\n")[2].strip() for section in sections if section.startswith("`"))

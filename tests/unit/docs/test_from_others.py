"""Pages for users of other frameworks: what they call ours is a key of a recipe, and what links to them is there."""

import re
from pathlib import Path

import pytest

from tests.unit.docs.test_docs import recipe_keys

ROOT = Path(__file__).parents[3]
KEYS = {key.removeprefix(".") for key in recipe_keys()}
SECTIONS = {key.rpartition(".")[0] for key in KEYS}


@pytest.mark.parametrize("page", ["from-trl", "from-verl"])
def test_what_the_tables_of_keys_call_ours_is_a_key(page):
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| ?(.*)\|$", text.partition("\n## Keys\n")[2].partition("\n## ")[0], flags=re.M
    )[1:]
    assert len(rows) > 30
    for theirs, ours, _ in rows:
        named = [word.partition(":")[0] for word in re.findall(r"`([^`]+)`", ours) if re.match(r"[a-z_.]+(:|$)", word)]
        assert named or "same names" in ours or "--resume" in ours, theirs
        assert set(named) <= KEYS | SECTIONS, (theirs, ours)

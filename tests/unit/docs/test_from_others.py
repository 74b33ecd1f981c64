"""Pages for users of other frameworks: what they call ours is a key of a recipe, and what links to them is there."""

import re
from pathlib import Path

import pytest

from hybridflow.recipe.other_names import NAMES, find_other_name
from tests.unit.docs.test_docs import recipe_keys

ROOT = Path(__file__).parents[3]
KEYS = {key.removeprefix(".") for key in recipe_keys()}
LAST_WORDS = {key.rpartition(".")[2] for key in KEYS}
SECTIONS = {key.rpartition(".")[0] for key in KEYS}


def rows_of(page):
    """Their names, ours, and the difference, of each row of a page's table of keys."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    table = text.partition("\n## Keys\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (.+?) \| (.+?) \| ?(.*)\|$", table, flags=re.M)[1:]


@pytest.mark.parametrize("page", ["from-trl", "from-verl", "from-slime"])
def test_what_the_tables_of_keys_call_ours_is_a_key(page):
    rows = rows_of(page)
    assert len(rows) > 30
    for theirs, ours, _ in rows:
        named = [word.partition(":")[0] for word in re.findall(r"`([^`]+)`", ours) if re.match(r"[a-z_.]+(:|$)", word)]
        assert named or "same names" in ours or "--resume" in ours, theirs
        assert set(named) <= KEYS | SECTIONS, (theirs, ours)


NO_SETTINGS = ("accelerate", "DPOConfig")
"""What rows name in addition to settings: a program, and a class."""


@pytest.mark.parametrize(("page", "framework"), [("from-trl", "TRL"), ("from-verl", "verl"), ("from-slime", "slime")])
def test_each_name_of_theirs_is_answered_with_a_key_of_its_row(page, framework):
    wrong = []
    for theirs, ours, _ in rows_of(page):
        keys = [word.partition(":")[0] for word in re.findall(r"`([^`]+)`", ours)] + re.findall("--resume", ours)
        for word in re.findall(r"`([a-z_.…0-9]+)", theirs):
            # A word that ends a key of ours is answered with this.
            if word in NO_SETTINGS or word in LAST_WORDS:
                continue
            # A row may leave out the section that several names share.
            end = word.lstrip("….")
            names = [name for name in NAMES[framework] if name == end or name.endswith(f".{end}")] or [end]
            answers = [f"{found.key} {found.remark}" for found in map(find_other_name, names) if found is not None]
            if not any(key in answer for key in keys for answer in answers):
                wrong.append((word, answers, ours))
    assert not wrong

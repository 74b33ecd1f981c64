"""Recipes that would exhaust memory or time, or that YAML 1.1 reads as something else, are refused by name."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

import pytest

from hybridflow import cli
from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError
from hybridflow.launch.site import Site
from hybridflow.recipe.load import load_recipe
from hybridflow.sections import _Reader, keys_of, parse_yaml, read_yaml
from tests.support.complaints import complains
from tests.support.recipes import SMALLEST

LONG = "is longer than 524288 characters"
DEEP = "is nested deeper than 64 levels"


def bomb(first: str, each: str) -> str:
    """Nine lines, each of which names the one before nine times: 9**9 values of 350 characters."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{level}: &a{level} " + each.format(", ".join([f"*a{level - 1}"] * 9)) for level in range(1, 10)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (bomb("x", "[{}]"), [": a9: ", LONG, "aliases"]),
        (bomb("{x: 1}", "{{<<: [{}]}}"), [LONG, "aliases"]),
        ("a: &a [*a]", [": a: ", DEEP]),
        ("a: &a {b: *a}", [": a: ", DEEP]),
        ("a: " + "[" * 5000, [DEEP]),
        ("a: " + "{b: " * 5000, [DEEP]),
        ("a: " + "[" * 70 + "]" * 70, [": a: ", DEEP]),
        ("\n".join(f"k{number}: 1" for number in range(60_000)), [LONG]),
        ("? [a, b]\n: 1", ["not valid YAML", "a key that is no text"]),
        ("a: !!timestamp x", ["not valid YAML"]),
        ("a: !!bool x", ["not valid YAML"]),
        ("a: !!int ''", ["not valid YAML"]),
        ("a: !!python/object/apply:os.system [ls]", ["not valid YAML"]),
    ],
)
def test_yaml_is_refused_that_would_exhaust_the_machine(tmp_path, capsys, text, says):
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    complains(lambda: load_recipe(path), [str(path), *says], ConfigError)
    assert cli.main(["train", str(path), "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"hybridflow: {path}") and len(err) < 1000 and "Traceback" not in err


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "model.num_layers=1000000000",
            "model.num_layers: expected an integer of at least 1 and at most 16384, found 1",
        ),
        (
            "cluster.ranks=1000000000",
            "ranks: expected an integer of at least 1 and at most 65536, found 1000000",
        ),
        ("model.num_experts=60000", "model.num_layers=2 × model.num_experts=60000 = 120000 experts, more than 65536"),
        (
            "rollout.group_size=1000000000",
            "group_size: expected an integer of at least 1 and at most 16777216, found 1",
        ),
        ("actor.ranks=[99999999999]", "actor.ranks[0]: expected an integer of at most 16777216, found 99999999999"),
        ("actor.update={tp: 100000}", "layout tp=100000: expected an integer of at least 1 and at most 65536"),
        ("actor.update={tp: 1000, pp: 1000}", "layout tp·pp·dp·cp = 1000000 ranks: expected at most 65536"),
        ("trainer.steps=1:30", "trainer.steps: expected an integer of at least 0, found '1:30' (text)"),
        ("trainer.steps=010", "trainer.steps: expected an integer of at least 0, found '010' (text)"),
        ("trainer.steps=!!int 1:30", "trainer.steps: expected an integer of at least 0, found '1:30' (text)"),
        ("actor.optimizer.lr=1:30.5", "actor.optimizer.lr: expected a number above 0, found '1:30.5' (text)"),
        ("trainer.steps=" + "9" * 6000, "trainer.steps: expected an integer of at least 0, found '99999"),
        (
            "cluster.deadline_s=1e300",
            "deadline_s: expected a number above 0 and at most 100000000, found 1e+300",
        ),
        ("trainer.steps" + ".a" * 5000 + "=1", "has 5001 dots, and no key has more than 64"),
        ("fallbacks=[" + "{ranks: 2}, " * 65 + "]", "fallbacks: found 65, expected at most 64; remove some"),
    ],
)
def test_overrides_are_refused_that_would_exhaust_the_machine(tmp_path, capsys, override, says):
    path = tmp_path / "small.yaml"
    path.write_text(SMALLEST)
    assert cli.main(["train", str(path), "--dry-run", override]) == 2
    err = capsys.readouterr().err
    assert says in err and len(err) < 1000 and "Traceback" not in err


def integer_keys(kind: type) -> Iterator[tuple[str, object]]:
    """Every key of a section and of those inside it that takes an integer, and what it takes."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for name in (item.name for item in keys_of(kind)):
        for option in (hints[name], *typing.get_args(hints[name])):
            if dataclasses.is_dataclass(option):
                yield from integer_keys(typing.cast(type, option))
            elif option is int or typing.get_args(option)[:1] == (int,) and "Annotated" in str(option):
                yield f"{kind.__name__}.{name}", option


def test_no_key_takes_an_integer_without_bound():
    keys = [*integer_keys(Recipe), *integer_keys(Site)]
    assert len(keys) > 60
    for key, hint in keys:
        for value in (2**60, 10**400, 10**5000):
            with pytest.raises(ConfigError, match="at most [0-9]+"):
                _Reader(root=Recipe, source="s", origins={}).value(hint, value, key)


def test_numbers_and_aliases_that_are_harmless_are_read(tmp_path):
    text = "base: &base {a: 1_000, b: 0x10, c: -5, d: 0.5, e: 0}\nother: {<<: *base, a: 2}\ntime: 24:00:00"
    path = tmp_path / "a.yaml"
    path.write_text(text)
    base = {"a": 1000, "b": 16, "c": -5, "d": 0.5, "e": 0}
    assert read_yaml(path) == {"base": base, "other": {**base, "a": 2}, "time": "24:00:00"}
    assert parse_yaml("", "x") is None
    # Lists of integers take another way; what YAML reads as something else does not.
    assert parse_yaml(f"[{', '.join(map(str, range(9000)))}]", "x") == [*range(9000)]
    for text, value in (("[0, 12]", [0, 12]), ("[1,2]", [1, 2]), ("[7]", [7]), ("[]", []), ("[1, a]", [1, "a"])):
        assert parse_yaml(text, "x") == value

#!/usr/bin/env python3
"""Write the parts of docs/ that are made from the code: keys of recipes and sites, defaults of algorithms, plans.

Examples:
  python tools/write_docs.py
  python tools/write_docs.py --check
"""

import argparse
import contextlib
import dataclasses
import inspect
import io
import json
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow import cli
from hybridflow.config.recipe import Recipe
from hybridflow.errors import DataError, HybridflowError
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.launch.site import Site
from hybridflow.sections import describe, resume_rules
from hybridflow.sections import keys_of as keys_of_section

DOCS = Path(__file__).parents[1] / "docs"


def main() -> int:
    """Read the command line; write the parts, or tell which are not as the code has them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a part is not up to date")
    check = parser.parse_args().check
    stale = []
    try:
        for name, part in (
            ("keys", ("keys", keys_of(Recipe, resume_rules(Recipe)))),
            ("slurm", ("keys", keys_of(Site, {}))),
            ("algorithms", ("defaults", algorithm_defaults())),
            ("architecture", plan()),
            ("architecture", picture()),
            ("reshard", reshard()),
        ):
            path = DOCS / f"{name}.md"
            before = path.read_text(encoding="utf-8")
            after = with_part(before, *part, str(path))
            if after != before:
                stale.append(f"docs/{name}.md: {part[0]}")
                if not check:
                    path.write_text(after, encoding="utf-8")
    except HybridflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for each in stale:
        print(f"{each} {'is not as the code has it; run tools/write_docs.py' if check else 'written anew'}")
    return int(check and bool(stale))


def with_part(text: str, name: str, content: str, source: str) -> str:
    """The text with what stands between ``<!-- name -->`` and ``<!-- end of name -->`` replaced."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise DataError(f"{source}: expected the lines {start.strip()} and {end} once each; put them back")
    before, rest = text.split(start)
    return f"{before}{start}{content}\n{end}{rest.split(end)[1]}"


def algorithm_defaults() -> str:
    """A table of the defaults that an algorithm has of its own: a row for each with any that it learns by."""
    rows = ["| algorithm | own defaults |", "|---|---|"]
    for name, algorithm in ALGORITHMS.items():
        settings = [
            f"`{section}.{key}: {value}`"
            for section, values in algorithm.traits.defaults.items()
            if section in ("kl", "loss", "advantage", "shaping")
            for key, value in values.items()
        ]
        if settings:
            rows.append(f"| `{name}` | {', '.join(settings)} |")
    return "\n".join([*rows, "| all others | none |"])


def plan() -> tuple[str, str]:
    """What ``hybridflow plan job quickstart`` prints, without the warm start and what follows the updates."""
    lines = output("plan", "job", "quickstart").splitlines()
    program, loop = lines.index("program") + 1, next(i for i, line in enumerate(lines) if "loop train_step" in line)
    last = next(index for index, line in enumerate(lines) if "branch validate" in line)
    return "plan", "\n".join(["```text", *lines[:program], "  …", *lines[loop:last], "    …", "```"])


def picture() -> tuple[str, str]:
    """The step as a Mermaid flowchart."""
    return "picture", "```mermaid\n" + output("plan", "job", "quickstart", "--mermaid") + "```"


def reshard() -> tuple[str, str]:
    """What ``hybridflow plan reshard`` prints in the example of its documentation."""
    printed = output("plan", "reshard", "--from", "tp4.pp2.dp2", "--to", "tp2.pp1.dp8")
    return "plan reshard", f"```text\n{printed}```"


def output(*command: str) -> str:
    """What the command line prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = cli.main(command)
    assert status == 0, f"hybridflow {' '.join(command)} ended with {status}"
    return printed.getvalue()


def keys_of(whole: type, rules: Mapping[str, bool]) -> str:
    """Return a table for each section of a recipe or of site settings: key, what it takes, default, meaning.

    Args:
        whole: The outermost section.
        rules: From ``resume_rules``, for a column that says what a resume does; empty: no such column.
    """
    places: dict[type, list[str]] = {}
    for kind, key in sections(whole, ""):
        places.setdefault(kind, []).append(key)
    lines = []
    for kind, keys in places.items():
        heading = ", ".join(f"`{key}`" for key in keys) if kind is not whole else "The whole"
        lines += ["", f"### {heading}", as_markdown((inspect.getdoc(kind) or "").splitlines()[0]), ""]
        columns = ["key", "takes", "default", *(["on resume"] if rules else []), "meaning"]
        lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        meanings = attributes(kind)
        for field in keys_of_section(kind):
            if field.name not in meanings:
                raise DataError(f"{kind.__name__}.{field.name}: the docstring does not say what it means; add it")
            cells = [f"`{field.name}`", *row(kind, field)]
            cells += [on_resume(field.name, keys, rules)] if rules else []
            lines.append(f"| {' | '.join([*cells, meanings[field.name]])} |")
    return "\n".join(lines[1:])


def row(kind: type, field: Any) -> tuple[str, str]:
    """Return what a key takes, and its default."""
    hint = typing.get_type_hints(kind, include_extras=True)[field.name]
    missing = "[filled in](recipes.md#what-may-be-left-out)" if field.metadata.get("filled_in") else "required"
    inner = section_of(hint)
    if inner is not None:
        is_list = typing.get_origin(hint) is tuple
        takes = (
            "a list of sections"
            if is_list
            else "a section or null"
            if type(None) in typing.get_args(hint)
            else "a section"
        )
        defaults = {dataclasses.MISSING: missing, None: "null", (): "`[]`"}
        default = next((text for value, text in defaults.items() if field.default is value), "its own")
    else:
        takes = re.sub(r"like (\S+)", r"like `\1`", describe(hint))
        given = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = missing if given is dataclasses.MISSING else f"`{in_yaml(given)}`"
    return takes, default


def on_resume(name: str, places: list[str], rules: Mapping[str, bool]) -> str:
    """Return whether a resumed run may change a key of the section that stands at these places."""
    keys = {place: f"{place}.{name}" if place else name for place in places}
    # Keys within a list of sections follow the list.
    free = [place for place, key in keys.items() if rules[key if key in rules else place]]
    if len(free) == len(places):
        return "may change"
    if any(is_free and rule.startswith(f"{key}.") for rule, is_free in rules.items() for key in keys.values()):
        return "its keys say"
    return f"must match; may change in {', '.join(f'`{place}`' for place in free)}" if free else "must match"


def sections(kind: Any, key: str) -> Iterator[tuple[type, str]]:
    """A section and those inside it, each with its dotted key."""
    yield kind, key
    hints = typing.get_type_hints(kind)
    for name in (field.name for field in keys_of_section(kind)):
        inner = section_of(hints[name])
        if inner is not None:
            yield from sections(inner, f"{key}.{name}" if key else name)


def section_of(hint: Any) -> type | None:
    """The section that a key takes; None for any other type."""
    options = (option for option in (hint, *typing.get_args(hint)) if isinstance(option, type))
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def attributes(kind: type) -> dict[str, str]:
    """What a class's docstring says of its attributes, as Markdown."""
    found: dict[str, str] = {}
    name = ""
    _, _, text = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    for line in text.splitlines():
        if not line.startswith("    "):
            break
        match = re.match(r"    (\w+): (.*)", line)
        name = match[1] if match is not None else name
        found[name] = match[2] if match is not None else f"{found[name]} {line.strip()}"
    return {name: as_markdown(text) for name, text in found.items()}


def as_markdown(text: str) -> str:
    """A docstring's words in Markdown, and in YAML's: its null is Python's None."""
    return re.sub(r"\bNone\b", "null", text).replace("``", "`")


def in_yaml(value: object) -> str:
    """A default as a recipe would have it."""
    return json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())

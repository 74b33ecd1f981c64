#!/usr/bin/env python3
"""Build the reference of the Python API as HTML, with pdoc: the public names, and modules that the docs import from.

Needs `pip install 'hybridflow[docs]'`. What is there of an earlier build is replaced.

Examples:
  python tools/build_api.py
  python tools/build_api.py --out /srv/www/hybridflow

Exit status: 0 done, 1 pdoc warned of something, which is then shown, 2 pdoc is not installed.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import typing
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import hybridflow
from hybridflow.observe.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "api"

ALWAYS = ("hybridflow", "hybridflow.config", "hybridflow.errors")


def documented_modules() -> list[str]:
    """The modules of the reference: the package, those that define its public names, those that the docs import."""
    named = {*ALWAYS, *(f"hybridflow.{module}" for module in public_modules())}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        named |= set(re.findall(r"^\s*(?:from|import) (hybridflow[\w.]*)", page.read_text(encoding="utf-8"), re.M))
    return sorted(named)


def public_modules() -> set[str]:
    """Modules below ``hybridflow`` that define public names."""
    return {
        getattr(hybridflow, name).__module__.removeprefix("hybridflow.")
        for name in hybridflow.__all__
        if not name.startswith("_")
    }


def build(names: Sequence[str], out: Path) -> list[str]:
    """Write a page for each module, an index and a search.

    Returns:
        What pdoc warned of, in a line each.
    """
    import pdoc.doc
    import pdoc.render

    modules = {name: importlib.import_module(name) for name in names}
    _resolve(hybridflow)
    for module in modules.values():
        _resolve_named_tuples(module)
    pdoc.render.configure(docformat="google", footer_text=f"hybridflow {hybridflow.__version__}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pages = {name: pdoc.doc.Module(module) for name, module in modules.items()}
        for path, text in _pages(pages):
            path = out / path
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode())
    return [str(warning.message) for warning in caught]


def _pages(modules: dict[str, object]) -> Iterator[tuple[str, str]]:
    """Path below the output, and HTML or JavaScript."""
    import pdoc.render

    for name, module in modules.items():
        yield f"{name.replace('.', '/')}.html", pdoc.render.html_module(module, modules)
    yield "index.html", pdoc.render.html_index(modules)
    yield "search.js", pdoc.render.search_index(modules)


def _resolve(package: ModuleType) -> None:
    """Names that come in when they are asked for become names that are there."""
    for name in package.__all__:
        setattr(package, name, getattr(package, name))


def _resolve_named_tuples(module: ModuleType) -> None:
    """What makes a named tuple stands in no module, where pdoc would look up the types that it names."""
    for found in vars(module).values():
        if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields"):
            found.__new__.__annotations__ = typing.get_type_hints(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, build, tell."""
    summary, _, rest = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="of the pages (default: build/api)")
    options = parser.parse_args(argv)
    try:
        importlib.import_module("pdoc")
    except ImportError as error:
        print(f"build_api: {error}; install it with: pip install 'hybridflow[docs]'", file=sys.stderr)
        return 2
    with warnings.catch_warnings():
        # What others say of themselves when they are imported.
        warnings.simplefilter("ignore")
        names = documented_modules()
        for name in names:
            importlib.import_module(name)
    complaints = build(names, options.out)
    for line in complaints:
        print(f"build_api: {line}", file=sys.stderr)
    print(f"{len(names)} modules in {options.out}/index.html")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())

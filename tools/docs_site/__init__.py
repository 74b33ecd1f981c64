"""Pages of the docs site that are not in docs/: the README, sources that the docs link to, the Python reference.

mkdocs calls the functions below. A link of docs/ to ``../path`` works in the repository, and here leads to a page made
of that path, so that the site needs no other host.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

import hybridflow

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = ("hybridflow.config", "hybridflow.errors")
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".c": "c", ".sh": "bash", ".sbatch": "bash"}


def on_config(config: Any) -> Any:
    """Put the reference into the navigation."""
    pages = [{"Public names": "reference/index.md"}, *(f"reference/{module}.md" for module in reference_modules())]
    config.nav = [*config.nav, {"Reference": pages}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of other places, and those of the sources that all pages link to."""
    pages = {place: (ROOT / name).read_text(encoding="utf-8") for name, place in MOVED.items()}
    pages |= dict(reference_pages())
    texts = [*pages.values(), *(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))]
    for source in sorted({source for text in texts for source in map(source_of, LINK.findall(text)) if source}):
        pages[source_page(source)] = source_text(source)
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where their targets are on the site; begin lists and tables as Python-Markdown asks for it."""
    here = PurePosixPath(page.file.src_uri)
    if here.parts[0] in ("source", "reference"):
        return markdown
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "\n".join(part if part.startswith("```") else spaced(LINK.sub(target_of, part)) for part in parts)


def source_of(link: str) -> str | None:
    """Return the path in the repository of a link that leads out of docs/; None for links between pages."""
    path = link.removeprefix("../").rstrip("/")
    is_page = path.startswith("docs/") or path in MOVED or (link == path and (ROOT / "docs" / path).exists())
    return path if not is_page and (ROOT / path).exists() else None


def target_of(found: re.Match[str]) -> str:
    """Return what a link becomes; all pages that have such links are in the top folder of the site."""
    link = found[0]
    source = source_of(link)
    if source is not None:
        return source_page(source)
    path = link.removeprefix("../").removeprefix("docs/")
    return MOVED.get(path, path)


def source_page(source: str) -> str:
    """Return the page of a file or folder."""
    return f"source/{source}.md"


def source_text(source: str) -> str:
    """Return the text of a file as a page; of a folder, what its modules do."""
    path, head = ROOT / source, f"---\nsearch: {{exclude: true}}\n---\n# {source}\n\n"
    if path.is_dir():
        modules = {
            each.name: ast.get_docstring(ast.parse(each.read_text("utf-8"))) for each in sorted(path.glob("*.py"))
        }
        rows = [f"| `{name}` | {text.partition(chr(10))[0]} |" for name, text in modules.items() if text]
        return head + "\n".join(["| module | what it has |", "|---|---|", *rows]) + "\n"
    return f"{head}``````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}``````\n"


def spaced(text: str) -> str:
    """Put an empty line before each list and table that follows a paragraph without one."""
    return re.sub(r"^(?![-|#\s])(.+)\n(?=(- |\|))", r"\1\n\n", text, flags=re.MULTILINE)


def reference_modules() -> list[str]:
    """Return modules of the reference: those of public names, those that the docs import from."""
    named = {*ALWAYS, *(f"hybridflow.{module}" for module in hybridflow._API)}
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        named |= set(re.findall(r"^\s*(?:from|import) (hybridflow\.[\w.]+)", path.read_text(encoding="utf-8"), re.M))
    return sorted(named)


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yield place and text of the pages of the reference, whose directives mkdocstrings replaces."""
    rows = [
        f"| [`{name}`]({module}.md#{module}.{name}) | {first_line(module, name)} |"
        for name, module in public_names().items()
    ]
    head = ["# Public names", "", "| `from hybridflow import` | what it is |", "|---|---|"]
    yield "reference/index.md", "\n".join([*head, *rows, ""])
    for module in reference_modules():
        names = [name for name, place in public_names().items() if place == module]
        entries = "\n\n".join(f"::: {module}.{name}" for name in names) if names else f"::: {module}"
        yield f"reference/{module}.md", f"# {module}\n\n{entries}\n"


def public_names() -> dict[str, str]:
    """Return the module of each public name, by name."""
    return {name: f"hybridflow.{module}" for name, module in sorted(hybridflow._MODULES.items())}


def first_line(module: str, name: str) -> str:
    """Return the first line of the docstring of a class or function of a module."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name]
    return (ast.get_docstring(found[0]) or "").partition("\n")[0].replace("``", "`") if found else ""

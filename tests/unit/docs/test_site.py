"""The docs site has every page, is built without a warning, and asks no other host for anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hybridflow

ROOT = Path(__file__).parents[3]
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
RESOURCE = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\s\">]+)|<link\b[^>]*\bhref=\"?([^\s\">]+)")


def test_the_navigation_has_every_page_once():
    pages = re.findall(r"^ {6}- (\S+\.md)$", SETTINGS, flags=re.MULTILINE)
    assert sorted(pages) == sorted(
        [*(path.name for path in (ROOT / "docs").glob("*.md")), "index.md", "contributing.md"]
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with warnings as errors."""
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def page(site, name):
    return (site / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    index = page(site, "reference/index.html")
    for name, module in hybridflow._MODULES.items():
        anchor = f"hybridflow.{module}.{name}"
        assert f'id="{anchor}"' in page(site, f"reference/hybridflow.{module}.html"), name
        assert f'href="hybridflow.{module}.html#{anchor}"' in index, name
        assert anchor in page(site, "search/search_index.json"), name
    assert "batch_size" in page(site, "reference/hybridflow.api.trainers.html")


@pytest.mark.slow
def test_links_out_of_docs_lead_to_pages_of_the_site(site):
    assert 'href="source/hybridflow/parallel/start.py.html"' in page(site, "launchers.html")
    assert "rendezvous" in page(site, "source/hybridflow/parallel/start.py.html")
    assert 'href="index.html#install"' in page(site, "slurm.html") and 'id="install"' in page(site, "index.html")
    assert 'href="contributing.html"' in page(site, "index.html") and 'href="source/LICENSE.html"' in page(
        site, "index.html"
    )
    # No table or list has become the text of a paragraph.
    for path in site.glob("*.html"):
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        broken = [
            each for each in re.findall(r"<p>(.*?)</p>", text, flags=re.DOTALL) if re.search(r"^(\||- )", each, re.M)
        ]
        assert not broken, f"{path.name}: {broken[0][:80]}"


@pytest.mark.slow
def test_pages_load_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for path in pages:
        loaded = ["".join(found) for found in RESOURCE.findall(path.read_text(encoding="utf-8"))]
        assert loaded and not [each for each in loaded if re.match(r"(https?:)?//", each)], path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", path.read_text(encoding="utf-8")), path
    # The theme would ask another host for the program that draws these.
    assert not [path for path in pages if 'class="mermaid"' in path.read_text(encoding="utf-8")]

"""The reports of real runs in a browser: DPO, and samples made ahead by a run that was killed and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.report.page import LARGEST_BYTES
from tests.e2e.commands import RECIPE, fork_ranks, kill_in_step, run_well, write_recipe
from tests.support.browser import loading_ms, opened, press_until, running_browser, text, walk_to_a_token

pytestmark = pytest.mark.slow

GIVEN = "\n".join(line for line in RECIPE.splitlines() if not line.startswith(("reward:", "rollout:", "  rollout:")))
"""Without what generates and rewards."""
DPO = ["algorithm=dpo", "data.arithmetic.num_train=40"]
AHEAD = ["actor={ranks: [0], update: {}, rollout: {}, rollout_ranks: [1]}", "trainer.max_staleness=1"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report that each run wrote at its end."""
    found = {}
    for name in ("dpo", "ahead"):
        folder = tmp_path_factory.mktemp(name)
        write_recipe(folder, GIVEN if name == "dpo" else RECIPE)
        found[name] = folder / "run/report.html"
    run_well(["train", "tiny.yaml", *DPO], found["dpo"].parents[1])
    folder, run = found["ahead"].parents[1], ["train", "tiny.yaml", *AHEAD, "trainer.steps=4", "trainer.save_every=1"]
    assert fork_ranks(run, folder, hook=lambda rank: kill_in_step(3)).codes == (-9, -9)
    run_well([*run, "--resume"], folder)
    return found


@pytest.mark.parametrize(("name", "last", "call"), [("dpo", 2, "actor.update"), ("ahead", 4, "actor.sample")])
def test_it_opens_at_once_and_is_walked_through_by_keyboard(reports: dict[str, Path], name: str, last: int, call: str):
    path = reports[name]
    assert path.stat().st_size < LARGEST_BYTES
    with running_browser() as browser, opened(browser, path) as page:
        assert loading_ms(page) < 2000 and page.locator(".chart canvas").count() >= 4
        assert text(page, "#step-note").startswith(f"Step {last}")
        page.keyboard.press("ArrowLeft")
        assert text(page, "#step-note").startswith(f"Step {last - 1}")
        _walk_groups(page, name)
        press_until(page, "Tab", ".lanes")
        told = []
        # The second rank's: where samples are made ahead, it makes them.
        for key in ("ArrowRight", "ArrowDown", *["ArrowRight"] * 20):
            page.keyboard.press(key)
            told.append(text(page, ".span-told"))
        assert any(call in words for words in told), told
        starts = text(page, "#starts-body")
        assert ("killed" in starts) is (name == "ahead") and "done" in starts


def _walk_groups(page: Any, name: str) -> None:
    if name == "dpo":
        # Nothing is sampled by DPO.
        assert page.locator(".response").count() == 0
        return
    walk_to_a_token(page)

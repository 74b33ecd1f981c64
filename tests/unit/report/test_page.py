"""The page in a browser: quick, without a request or an error, by keyboard, on a phone, in dark and in light."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe.starts import StartRecord, add_start
from hybridflow.observe.summary import write_summary
from hybridflow.report.page import write_report
from tests.support.browser import loading_ms, opened, press_until, running_browser, text
from tests.support.report_runs import HOSTILE, write_run

pytestmark = pytest.mark.slow


def no_plan(run_dir):
    return None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run; two runs of which one has no archive; a large one; a run that has only begun."""
    folder = tmp_path_factory.mktemp("pages")
    one = write_run(folder / "one")
    other = write_run(folder / "other", num_steps=9, has_archive=False, recipe={"seed": 2})
    large = write_run(folder / "large", num_steps=40, num_ranks=40, num_groups=9, group_size=9, num_tokens=700)
    add_start(folder / "begun", StartRecord(number=1, began_s=0.0, step=None, ranks=1))
    runs = {"one": [one], "several": [one, other], "large": [large], "begun": [folder / "begun"]}
    return {name: write_report(run_dirs, folder / f"{name}.html", no_plan) for name, run_dirs in runs.items()}


@pytest.mark.parametrize("name", ["one", "several", "large", "begun"])
def test_a_page_opens_quickly_without_requests_and_errors(browser: Any, pages: dict[str, Path], name: str):
    with opened(browser, pages[name]) as page:
        assert loading_ms(page) < 2000
        assert page.locator("h1").inner_text() == "hybridflow report"
        num_charts = page.locator(".chart canvas").count()
        assert num_charts == 0 if name == "begun" else num_charts >= 6
        for chart in page.locator(".chart .plot").all():
            assert chart.get_attribute("role") == "img" and "at step" in chart.get_attribute("aria-label")


def test_a_card_says_accuracy_in_percent_as_the_console_does(browser: Any, pages: dict[str, Path], tmp_path: Path):
    with opened(browser, pages["one"]) as page:
        assert "held-out accuracy\n25.0% → 100.0%" in text(page, "#runs .card")
    run_dir = write_run(tmp_path / "scored", num_steps=1, is_done=False, has_archive=False)
    write_summary(run_dir, {"steps": 1, "score_before_rl": -0.5, "score_after_rl": 1.25})
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "time/step_s": 119.7}\n')
    path = write_report([run_dir], tmp_path / "scored.html", no_plan)
    with opened(browser, path) as page:
        assert "held-out score\n-0.5 → 1.25" in text(page, "#runs .card")
        assert "recent step\n2 min 0 s" in text(page, "#runs .card")


def test_steps_are_reached_by_keyboard(browser: Any, pages: dict[str, Path]):
    with opened(browser, pages["one"]) as page:
        assert text(page, "#step-note").startswith("Step 6: 3 groups of 3, 12 responses of 12.")
        page.keyboard.press("ArrowLeft")
        assert text(page, "#step-note").startswith("Step 5:")
        press_until(page, "Tab", "#step-number")
        page.keyboard.press("Control+A")
        page.keyboard.type("2")
        page.keyboard.press("Enter")
        assert text(page, "#step-note").startswith("Step 2:") and text(page, "#groups h3") == "Prompt 6"
        press_until(page, "Tab", "button[aria-label='Step after']", most=3)
        page.keyboard.press("Enter")
        assert text(page, "#step-note").startswith("Step 3:")
        page.fill("#step-number", "77")
        page.keyboard.press("Enter")
        assert text(page, "#step-note").startswith("Step 77 is not on this page; the nearest one is shown. Step 6:")


def test_groups_and_tokens_are_reached_by_keyboard(browser: Any, pages: dict[str, Path]):
    with opened(browser, pages["one"]) as page:
        press_until(page, "Tab", "#colors")
        press_until(page, "Tab", ".response[aria-label='Response 1, reward 0']", most=4)
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        told = text(page, ".token-told")
        for words in ("token 2 of response 1", "advantage −0.5", "log-prob -0.1", "|Δ log-prob| 0.25", "age 1 update"):
            assert words in told
        # It was the token that moved, not the step.
        assert text(page, "#step-note").startswith("Step 6:")


def test_a_long_response_is_walked_through_across_what_is_cut(browser: Any, pages: dict[str, Path]):
    with opened(browser, pages["large"]) as page:
        page.locator(".response").first.focus()
        for _ in range(401):
            page.keyboard.press("ArrowRight")
        # 400 tokens are shown before the 100 that are left out.
        assert text(page, ".token-told").startswith("token 501 of response 0")
        here = page.locator(".tok.here")
        assert here.is_visible() and "100 tokens" in page.locator(".cut").first.inner_text()


def test_the_timeline_is_reached_by_keyboard(browser: Any, pages: dict[str, Path]):
    with opened(browser, pages["one"]) as page:
        press_until(page, "Tab", "#colors")
        press_until(page, "Tab", ".lanes")
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
        assert text(page, ".span-told").startswith("rank 1 · reward.score · 0.101 s from 0.15 s")
        assert page.locator(".lanes rect.here").count() == 1


def test_a_click_on_a_chart_chooses_a_step(browser: Any, pages: dict[str, Path]):
    with opened(browser, pages["one"]) as page:
        over = page.locator(".chart .u-over").first
        box = over.bounding_box()
        # The axis reaches from 0 to a little beyond step 6.
        over.click(position={"x": box["width"] * 3 / 6.3, "y": 40})
        assert text(page, "#step-note").startswith("Step 3:")
        assert "step 3" in text(page, ".chart .now")


def test_tokens_are_colored_by_what_is_chosen(browser: Any, pages: dict[str, Path]):
    with opened(browser, pages["one"]) as page:
        tokens = page.locator(".response .tok")

        def colors() -> list[str]:
            return [token.evaluate("node => getComputedStyle(node).backgroundColor") for token in tokens.all()[:6]]

        by_advantage = colors()
        assert by_advantage[0] == by_advantage[2] != by_advantage[3] == by_advantage[5]
        page.select_option("#colors", "log_probs")
        by_log_prob = colors()
        # The first token's is 0, and the second response is as the first.
        assert len(set(by_log_prob[:3])) == 3 and by_log_prob[:3] == by_log_prob[3:]
        page.select_option("#colors", "none")
        assert len(set(colors())) == 1


def test_runs_are_compared_and_chosen(browser: Any, pages: dict[str, Path]):
    with opened(browser, pages["several"]) as page:
        assert page.locator("#legend span").count() == 2 and page.locator(".card").count() == 2
        page.select_option("#which", "1")
        assert "no archive of samples" in text(page, "#groups") and "Step 6 of other" in text(page, "#timeline-body")
        rows = page.locator("#recipe-body tbody tr").all_inner_texts()
        assert [row.split("\t") for row in rows] == [["name", "one", "other"], ["seed", "1", "2"]]
        num_charts = page.locator(".chart").count()
        page.select_option("#metric", "time/update_s")
        page.click("#more button")
        assert page.locator(".chart").count() == num_charts + 1


def test_hostile_texts_are_shown_as_they_are(browser: Any, pages: dict[str, Path]):
    with opened(browser, pages["one"]) as page:
        assert HOSTILE in text(page, ".prompt") and HOSTILE in text(page, "#starts-body")
        assert page.locator("img").count() == 0


@pytest.mark.parametrize("name", ["one", "several", "large", "begun"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_in_one_direction(browser: Any, pages: dict[str, Path], name: str, scheme: str):
    with opened(browser, pages[name], width=360, scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]


def test_every_control_has_a_name(browser: Any, pages: dict[str, Path]):
    with opened(browser, pages["several"]) as page:
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, [tabindex], [role=img], article, section")]
            .filter(node => !(node.getAttribute("aria-label") || node.getAttribute("aria-labelledby")
                || (node.labels && node.labels.length) || node.textContent.trim())).map(node => node.outerHTML)"""
        )
        assert nameless == []

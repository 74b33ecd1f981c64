"""How far estimates are from published measurements, and that docs/mapping.md says so."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from hybridflow import cli
from hybridflow.mapping.accuracy import ERRORS
from tests.unit.mapping.published import AGAIN, DECODINGS, MEMORIES, STEPS, SUMS

DOCS = (Path(__file__).parents[3] / "docs" / "mapping.md").read_text(encoding="utf-8")


_OTHERS = ("2023", "mixtures")


def summary(points) -> list[str]:
    """Return the rows of a table of docs/mapping.md."""
    groups = defaultdict(list)
    for point in points:
        groups[point.group, point.fitted].append(point.error)
    return [
        f"| {group} | {'fitted' if fitted else 'held back'} | {len(errors)} | "
        f"{sum(map(abs, errors)) / len(errors):.1f} % | {_signed(max(errors, key=abs))} % |"
        for (group, fitted), errors in groups.items()
    ]


def memory_rows() -> list[str]:
    return [
        f"| {one.name} | {one.layout} | {one.sequence} | {one.gib:.2f} | {one.estimate_gib():.2f} | "
        f"{_signed(one.error)} % |"
        for one in MEMORIES
    ]


def _signed(percent: float) -> str:
    return f"{percent:+.1f}".replace("-", "−")


@pytest.mark.parametrize("row", [*summary(STEPS), *summary(SUMS), *summary(AGAIN), *summary(DECODINGS), *memory_rows()])
def test_the_docs_say_how_far_estimates_are_from_what_was_published(row):
    assert row in DOCS.splitlines()


def errors_of(points, *groups) -> list[float]:
    return [abs(point.error) for point in points if point.group in groups]


def _dense(group) -> list[str]:
    return [f"{group}, {name}" for name in ("Mistral 7B", "LLaMA 7B", "LLaMA 70B")]


def test_the_command_says_the_largest_difference():
    found = {
        ("train", "h100-sxm"): errors_of(STEPS, "H100, bf16"),
        ("train fp8", "h100-sxm"): errors_of(STEPS, "H100, FP8"),
        ("train", "a100-80g"): errors_of(STEPS, "A100, bf16, recomputation"),
        ("train", "a100-80g-fused"): errors_of(STEPS, "A100, bf16, attention fused"),
        ("train", "b200"): errors_of(STEPS, "B200, bf16"),
        ("train fp8", "b200"): errors_of(STEPS, "B200, FP8"),
        ("train mixture", "b200"): errors_of(STEPS, "B200, bf16, mixtures"),
        ("train fp8 mixture", "b200"): errors_of(STEPS, "B200, FP8, mixtures"),
        ("train fp8 mixture", "h100-sxm"): errors_of(STEPS, "H100, FP8, mixtures"),
        ("generate fp8 mixture", "h100-sxm"): errors_of(AGAIN, "H100, FP8, Mixtral 8x7B"),
        ("generate fp8 mixture", "h200"): errors_of(AGAIN, "H200, FP8, Mixtral 8x7B"),
        ("generate mixture", "a100-80g-fused"): errors_of(AGAIN, "A100, bf16, Mixtral 8x7B"),
        ("generate", "h100-sxm"): errors_of(SUMS, "H100, bf16"),
        ("generate mixture", "h100-sxm"): errors_of(SUMS, "H100, bf16, mixtures"),
        ("generate fp8", "h100-sxm"): errors_of((*SUMS, *AGAIN), "H100, FP8", *_dense("H100, FP8")),
        ("generate", "h200"): errors_of(SUMS, "H200, bf16"),
        ("generate fp8", "h200"): errors_of((*SUMS, *AGAIN), "H200, FP8", *_dense("H200, FP8")),
        ("generate", "b200"): errors_of(SUMS, "B200, bf16"),
        ("generate", "a100-80g-fused"): errors_of((*SUMS, *AGAIN), "A100, bf16", *_dense("A100, bf16")),
    }
    for key, errors in found.items():
        percent, compared_with = ERRORS[key]
        assert percent == pytest.approx(max(errors), abs=0.051), key
        assert compared_with.startswith(str(len(errors))), key


def test_training_is_within_8_percent_on_average_of_what_was_held_back():
    for hardware in ("h100-sxm", "a100-80g"):
        errors = [
            abs(step.error)
            for step in STEPS
            if step.hardware == hardware and not step.fitted and not any(word in step.group for word in _OTHERS)
        ]
        assert len(errors) >= 3 and sum(errors) / len(errors) < 8


def test_generation_is_within_15_percent_on_average_of_what_was_held_back():
    for points in ((*SUMS, *AGAIN), (*SUMS, *AGAIN, *DECODINGS)):
        errors = [abs(point.error) for point in points if not point.fitted]
        assert len(errors) > 80 and sum(errors) / len(errors) < 15


@pytest.mark.parametrize("hardware", ["h100-sxm", "a100-80g"])
def test_layouts_whose_vpp_is_left_out_are_within_8_percent_on_average(capsys, hardware):
    errors = []
    for step in STEPS:
        if step.hardware != hardware or "pp" not in step.layout or "mixtures" in step.group:
            continue
        words = ["plan", "estimate", "--phase", "train", "--model", str(step.model), "--hardware", hardware, "--json"]
        words += ["--layout", ".".join(part for part in step.layout.split(".") if not part.startswith("vpp"))]
        words += ["--sequence", str(step.sequence), "--batch", str(step.batch), "--recompute", step.recompute]
        words += ["--micro-batch", str(step.micro_batch), "--dtype", "fp8" if step.fp8 else "bf16"]
        assert cli.main(words) == 0
        errors.append(abs(100 * (json.loads(capsys.readouterr().out)["seconds"] / step.seconds - 1)))
    assert len(errors) > 10 and sum(errors) / len(errors) < 8


def test_memory_is_within_5_percent_of_each_run():
    assert all(abs(one.error) < 5 for one in MEMORIES)

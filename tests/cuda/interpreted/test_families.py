"""The GPU kit's comparison of families, with the kernels in Triton's interpreter in the place of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist
from gpu_checks import families
from gpu_checks.common import make_world
from torch import Tensor

from hybridflow.families.tables import FAMILIES
from hybridflow.models import cuda_attention
from hybridflow.rollout import replica
from hybridflow.rollout.gpu.runner import GpuRunner, runs_on_gpu

SHORT = {"glm4_moe_lite", "qwen3_5_text"}
CLOSE = {"log-probabilities": 1e-5, "gradients": 1e-4, "weights": 1e-6, "text log-probabilities": 1e-5, "texts": 0}


@pytest.fixture(scope="module")
def world():
    yield make_world()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in FAMILIES]
)
def test_the_kernels_train_and_generate_as_a_cpu_does(world, monkeypatch, name):
    """All that is chosen by the device of a tensor is chosen as on an H100."""
    model, make_runner = families.model_of(name), replica.make_runner
    prompts = families.text_prompts()
    requests = [
        replace(each, params=replace(each.params, max_new_tokens=6))
        for each in families._requests(prompts[:2], model.vocab_size)
    ]
    monkeypatch.setattr(families, "_requests", lambda prompts, vocab: requests)

    def make(built, groups, vocab_size, *, max_rows, max_steps, keeps_choices=False):
        sizes = {"max_rows": max_rows, "max_steps": max_steps}
        if runs_on_gpu(built):
            return GpuRunner(built, groups, vocab_size, **sizes)
        return make_runner(built, groups, vocab_size, keeps_choices=keeps_choices, **sizes)

    expected = {each: value.detach().clone() for each, value in families._compute(world, model, prompts, None).items()}
    monkeypatch.setattr(replica, "make_runner", make)
    monkeypatch.setattr(cuda_attention, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
    found = {each: value.detach() for each, value in families._compute(world, model, prompts, None).items()}
    apart = families._differences(found, expected)
    assert apart and not {kind: gap for kind, gap in apart.items() if gap > CLOSE[kind]}

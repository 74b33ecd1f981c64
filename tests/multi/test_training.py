"""A model in training whose weights are written from outside."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import megatron.core.tensor_parallel.layers as megatron_layers
import pytest
import torch
import torch.distributed as dist

from hybridflow.config.roles import OptimizerConfig
from hybridflow.errors import DivergedError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models import context, experts, gpt, grouped
from hybridflow.models.layers import recompute_activations, recomputed
from hybridflow.models.microbatch import blank, pack
from hybridflow.models.specs import logical_tensors
from hybridflow.models.training import Trainable, forward_only
from hybridflow.parallel import accelerators
from tests.multi.models import CAPPED, MIXTURE, TINY, make_model, samples
from tests.support.ranks import run_ranks


def step_from_ones(world, model: ModelConfig, dtype: str, distributed: bool, clip_grad: float) -> float:
    """The largest distance from 1 after one small step of a model whose weights were all set to 1."""
    built, _, groups, _ = make_model(world, ParallelLayout(dp=2), model=replace(model, dtype=dtype))
    trainable = Trainable(built, groups, OptimizerConfig(lr=1e-6, distributed=distributed, clip_grad=clip_grad))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.fill_(1.0)
    trainable.reload_weights()
    sequences, prompts = samples(4)
    trainable.accumulate(
        [pack([0, 1, 2, 3], sequences, prompts, world.device)], lambda output, _: (output.float().mean(), None)
    )
    assert trainable.step() >= 0
    return max(float((parameter - 1).abs().max()) for parameter in built.parameters())


def cases(world):
    return {
        case: step_from_ones(world, *case)
        for case in [
            (TINY, "fp32", True, 1.0),
            (TINY, "fp32", False, 0.0),
            (TINY, "bf16", True, 1.0),
            (TINY, "bf16", False, 0.0),
            (CAPPED, "bf16", True, 1.0),
            (MIXTURE, "bf16", True, 1.0),
        ]
    }


def norm_without_gradients(world) -> float:
    """The norm of the gradient where a reward function, say, has turned gradients off for the whole thread."""
    built, _, groups, _ = make_model(world, ParallelLayout())
    trainable = Trainable(built, groups, OptimizerConfig(lr=1e-3))
    sequences, prompts = samples(1)
    with torch.no_grad():
        trainable.accumulate([pack([0], sequences, prompts, world.device)], lambda output, _: (output.mean(), None))
    return trainable.step()


def test_a_program_that_turns_gradients_off_does_not_stop_the_training():
    """megatron-core leaves the backward pass out where the loss requires no gradient, without a word."""
    assert run_ranks(norm_without_gradients, 1)[0] > 0


def decayed(world) -> dict[str, tuple[int, float]]:
    """Name -> dims of a tensor, and what is left of its ones after a step without gradients."""
    built, _, groups, _ = make_model(world, ParallelLayout(dp=2))
    trainable = Trainable(built, groups, OptimizerConfig(lr=0.5, weight_decay=0.1))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.fill_(1.0)
    trainable.reload_weights()
    trainable.accumulate([], lambda output, _: (output.sum(), None))
    trainable.step()
    return {name: (each.dim(), float(each.mean())) for name, each in logical_tensors(built).items()}


def test_matrices_decay_and_norms_and_biases_do_not():
    found = run_ranks(decayed, 2)[0]
    assert {dims for dims, _ in found.values()} == {1, 2}
    for name, (dims, left) in found.items():
        assert left == pytest.approx(0.95 if dims == 2 else 1.0), name


def initial_values(world, model: ModelConfig) -> dict[str, tuple[float, float]]:
    """Name -> mean and standard deviation of a tensor's initial weights."""
    built, *_ = make_model(world, ParallelLayout(), model=replace(model, qkv_bias=True), std=0.1)
    return {
        name: (float(tensor.mean()), float(tensor.std(correction=0))) for name, tensor in logical_tensors(built).items()
    }


@pytest.mark.parametrize("model", [CAPPED, MIXTURE], ids=["capped", "mixture"])
def test_weights_begin_as_norms_that_change_nothing_zero_biases_and_random_matrices(model):
    (found,) = run_ranks(initial_values, 1, model)
    for part in ("linear_qkv.bias", "post_layernorm" if model is CAPPED else "experts.3.linear_fc2"):
        assert any(part in name for name in found)
    for name, (mean, std) in found.items():
        if name.endswith("layernorm.weight"):
            assert (mean, std) == (0.0 if model.zero_centered_norms else 1.0, 0.0), name
        elif name.endswith("bias"):
            assert (mean, std) == (0.0, 0.0), name
        else:
            # The ends of residual branches are narrower by the root of 2 * 4 layers.
            expected = 0.1 / 8**0.5 if "linear_proj" in name or "linear_fc2" in name else 0.1
            # The padding of the uncut vocabulary, one row of thirty here, is 0.
            assert abs(std / expected - 1) < 0.12 and abs(mean) < 0.2 * expected, (name, mean, std)


def test_a_step_goes_on_from_weights_that_were_written_from_outside():
    for case, distance in run_ranks(cases, 2)[0].items():
        assert distance < 1e-5, (case, distance)


def diverged(world) -> list[str]:
    """What a step says on each rank whose gradient is infinite on one."""
    told = []
    for layout in (ParallelLayout(dp=2), ParallelLayout(pp=2)):
        built, _, groups, _ = make_model(world, layout)
        trainable = Trainable(built, groups, OptimizerConfig(lr=1e-3))
        sequences, prompts = samples(4)
        factor = float("inf") if world.rank == 1 else 1.0
        trainable.accumulate(
            [pack([0, 1, 2, 3], sequences, prompts, world.device)],
            lambda output, _, factor=factor: (output.float().mean() * factor, None),
        )
        try:
            trainable.step()
        except DivergedError as error:
            told.append(str(error))
    return told


def test_a_gradient_that_is_not_finite_ends_the_job_on_all_ranks():
    for told in run_ranks(diverged, 2):
        assert len(told) == 2 and all("norm of the gradient is nan" in each for each in told), told
        assert all("lower the learning rate (here 0.001)" in each for each in told), told


BIASED = replace(MIXTURE, linear_bias=True)


def norms_of_expert_biases(world) -> list[float]:
    """The norm of a gradient that is 1 for biases of experts and 0 for all else, by layout and optimizer."""
    found = []
    for text, distributed in (("tp2.ep2.etp1", True), ("tp2.ep2.etp1", False), ("dp2.etp2", True), ("dp2.etp2", False)):
        built, _, groups, _ = make_model(world, ParallelLayout.parse(text), model=BIASED)
        trainable = Trainable(built, groups, OptimizerConfig(lr=1e-3, distributed=distributed))
        trainable.begin()
        for name, parameter in built.named_parameters():
            if ".local_experts." in name and name.endswith(".bias"):
                parameter.main_grad.fill_(1.0)
        found.append(trainable.step())
    return found


def test_the_norm_has_each_bias_of_an_expert_once():
    # Four layers of four experts: gate, up and output.
    expected = (4 * 4 * (2 * BIASED.ffn_hidden_size + BIASED.hidden_size)) ** 0.5
    for found in run_ranks(norms_of_expert_biases, 2):
        assert found == pytest.approx([expected] * 4)


def difference_of_sharing(world, model: ModelConfig, layout: ParallelLayout) -> dict[str, float]:
    """How far outputs and gradients are from one another where samples share prompts, and where each is alone."""
    built, _, groups, _ = make_model(world, layout, model=model)
    trainable = Trainable(built, groups, OptimizerConfig(lr=1e-3, distributed=False))
    drawn, lengths = samples(12)
    # Three prompts, four responses to each.
    sequences = [torch.cat([drawn[each % 3][: lengths[each % 3]], drawn[each][lengths[each] :]]) for each in range(12)]
    prompts = [lengths[each % 3] for each in range(12)]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(len(sequence), 1, generator=generator) for sequence in sequences]
    found = []
    for split in ([[*range(12)]], [[each] for each in range(12)]):
        outputs: dict[int, torch.Tensor] = {}

        def loss(output, batch, outputs=outputs):
            parts = dict(zip(batch.samples, batch.gathered(output).split(batch.response_lengths), strict=True))
            outputs.update({each: part.detach() for each, part in parts.items()})
            return sum((part.square() * weights[each][: len(part)]).sum() for each, part in parts.items()), None

        batches = [pack(each, sequences, prompts, world.device, groups.cp) for each in split]
        trainable.accumulate(batches, loss)
        gradients = {name: each.clone() for name, each in trainable.state()["gradient"].items()}
        found.append((sum(len(batch.all_tokens) for batch in batches), outputs, gradients))
    (few, shared, one), (many, alone, another) = found
    assert many - few == 3 * sum(lengths[:3])
    return {
        "outputs": max(float((shared[each] - alone[each]).abs().max()) for each in range(12)),
        "gradients": max(float((one[name] - another[name]).abs().max()) for name in one),
        "largest": max(float(each.abs().max()) for each in another.values()),
    }


def differences_of_sharing(world):
    layouts = [ParallelLayout(tp=2), ParallelLayout(cp=2)]
    return [difference_of_sharing(world, model, each) for model in (TINY, CAPPED, MIXTURE) for each in layouts]


@pytest.mark.slow
def test_a_shared_prompt_changes_no_output_and_no_gradient():
    for found in run_ranks(differences_of_sharing, 2):
        for each in found:
            assert each["outputs"] < 1e-5 and each["gradients"] < 4e-6 * each["largest"], each
            assert each["largest"] > 1e-2, each


def messages_of_stages(world) -> list[tuple[int, ...]]:
    """Shapes of what this stage sends in a step over micro-batches of unequal lengths, and in forward passes."""
    sent, isend = [], dist.isend

    def note(tensor, *args, **kwargs):
        sent.append(tuple(tensor.shape))
        return isend(tensor, *args, **kwargs)

    dist.isend = note
    dist.batch_isend_irecv = None  # megatron-core's way to send shapes
    built, _, groups, _ = make_model(world, ParallelLayout(pp=2))
    trainable = Trainable(built, groups, OptimizerConfig(lr=1e-3))
    sequences, prompts = samples(4)
    batches = [pack(each, sequences, prompts, world.device) for each in ([0], [1, 2], [3])]
    trainable.accumulate(batches, lambda output, _: (output.float().mean(), None))
    forward_only(built, groups, batches, lambda output, _: output)
    trainable.step()
    return sent


def test_stages_send_hidden_states_and_no_shapes():
    sequences, _ = samples(4)
    lengths = [len(sequences[0]), len(sequences[1]) + len(sequences[2]), len(sequences[3])]
    shapes = [(length, 1, TINY.hidden_size) for length in lengths]
    assert run_ranks(messages_of_stages, 2) == [shapes * 2, shapes]


def differences_with_a_blank(world):
    """How far gradients are from one another with and without a micro-batch of which one rank has no token."""
    found = {}
    for name, model in {"tiny": TINY, "capped": CAPPED}.items():
        built, _, groups, _ = make_model(world, ParallelLayout(cp=2), model=model)
        trainable = Trainable(built, groups, OptimizerConfig(lr=1e-3, distributed=False))
        sequences, prompts = samples(3)
        some = [pack([0, 1, 2], sequences, prompts, world.device, context=groups.cp)]
        gradients = []
        for batches in (some, [*some, blank(world.device, groups.cp)]):
            trainable.accumulate(batches, lambda output, _: (output.square().mean(), None))
            gradients.append({key: each.clone() for key, each in trainable.state()["gradient"].items()})
        plain, other = gradients
        found[name] = max(float((each - other[key]).abs().max()) for key, each in plain.items())
    return found


@pytest.mark.parametrize("is_flash", [None, lambda *_: False], ids=["flash", "gathered"])
def test_a_rank_without_a_token_takes_part_in_the_backward_pass(monkeypatch, is_flash):
    if is_flash is not None:
        # As on a GPU.
        monkeypatch.setattr(context, "is_flash", is_flash)
    for each in run_ranks(differences_with_a_blank, 2):
        assert each == {"tiny": 0.0, "capped": 0.0}


def fused_differences(world):
    """How far gradients are from one another that layers add to the sums themselves, and that autograd hands on."""
    found, views, find_view = {}, [], grouped._side_by_side

    def keep_view(tensors):
        views.append((layout.dp, find_view(tensors)))
        return views[-1][1]

    gate = dict(activation="quick_gelu", glu_clamp=0.02, glu_offset=1.0)
    biased = replace(BIASED, **gate)
    for name, model in {"tiny": TINY, "capped": CAPPED, "mixture": MIXTURE, "biased": biased}.items():
        for layout, mode in (
            *((ParallelLayout(tp=2), "none"), (ParallelLayout(dp=2), "none"), (ParallelLayout(pp=2), "none")),
            (ParallelLayout(dp=2), "full"),
        ):
            gradients, number = [], 0
            for is_fused in (False, True):
                # Else the products are those of CPUs.
                with patch.object(gpt, "use_onednn"):
                    built, _, groups, _ = make_model(world, layout, model=model)
                recompute_activations(built, "actor", mode)
                settings = OptimizerConfig(lr=1e-3, distributed=model is MIXTURE)
                # Between buckets that end among so small experts there is a gap.
                bucket_size = 5000 if layout.dp > 1 else 1 << 20
                trainable = Trainable(built, groups, settings, bucket_size=bucket_size)
                with (
                    patch.object(accelerators, "add_weight_gradient", wraps=accelerators.add_weight_gradient) as add,
                    patch.object(grouped, "_add_gradients", wraps=grouped._add_gradients) as add_all,
                    patch.object(grouped, "_side_by_side", keep_view),
                    patch.object(experts, "is_grouped", lambda *_, is_fused=is_fused: is_fused),
                ):
                    if is_fused:
                        megatron_layers.__dict__.pop("fused_weight_gradient_mlp_cuda", None)
                        trainable._fused = {*built.modules()} - {*recomputed(built)}
                    sequences, prompts = samples(6)
                    batches = [pack(each, sequences, prompts, world.device) for each in ([0, 1, 2], [3, 4, 5])]
                    for _ in range(2):
                        trainable.accumulate(batches, lambda output, _: (output.square().mean(), None))
                        gradients.append({key: each.clone() for key, each in trainable.state()["gradient"].items()})
                        trainable.step()
                    number = add.call_count + add_all.call_count
                    if model is TINY and mode == "none":
                        # What they return is unfilled, so that none does it while torch searches for NaN.
                        with torch.autograd.set_detect_anomaly(True):
                            trainable.accumulate(batches, lambda output, _: (output.square().mean(), None))
                        assert add.call_count == number
            for plain, fused in zip(gradients[:2], gradients[2:], strict=True):
                most = max(float(each.abs().max()) for each in plain.values())
                off = max(float((each - fused[key]).abs().max()) for key, each in plain.items())
                found[f"{name} {layout} {mode}", len(found)] = off / most, number * layout.pp / (4 * model.num_layers)
    # DDP has laid the experts of a layer at equal distances, weights and sums, so that nothing is copied.
    assert {view is None for dp, view in views if dp == 1} == {False}
    return found


@pytest.mark.slow
def test_layers_that_add_weight_gradients_to_the_sums_add_those_of_autograd():
    for each in run_ranks(fused_differences, 2):
        assert len(each) == 32
        for case, (difference, per_layer) in each.items():
            # Two steps of two micro-batches; a layer has four matrices, or products. Of layers that are computed anew
            # the output layer alone adds.
            is_anew = "full" in case[0]
            assert difference < 1e-5 and (per_layer >= 4) != is_anew, (case, difference, per_layer)

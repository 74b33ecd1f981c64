"""Losses and biases of routers against formulas by hand, and the rollout's choices of experts in training."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from hybridflow.config.roles import MoEConfig
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.layers import recompute_activations
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.microbatch import pack
from hybridflow.models.router import ExpertRouter
from hybridflow.models.routing import choice_dtype, unknown_choice
from hybridflow.models.training import forward_only
from hybridflow.placement.routing import ROUTER_CHOICES, RouterWatch, attach_choices
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.request import SamplingParams
from tests.multi.models import MIXTURE, SHARED, VOCAB, make_model, nine_requests
from tests.support.ranks import run_ranks

MOE = MoEConfig(aux_loss=0.3, z_loss=0.02, bias_update_rate=0.125)
PROMPT = [3, 7, 9]
SEQUENCES = [[*PROMPT, 4, 5], [*PROMPT, 11], [8, 1, 2, 6]]
PROMPT_LENGTHS = [3, 3, 1]


def by_hand(model, config, logits):
    """Auxiliary loss, z-loss and loads of each layer, sample by sample and token by token."""
    aux, z, loads = torch.zeros(()), torch.zeros(()), torch.zeros(config.num_layers, config.num_experts)
    # Two samples have the prompt in common, which is computed once.
    places = [[0, 1, 2, 3, 4], [0, 1, 2, 5], [6, 7, 8, 9]]
    for layer, rows in enumerate(logits):
        bias = model.decoder.layers[layer].mlp.router.expert_bias
        for sample in places:
            chosen, shares = torch.zeros(config.num_experts), torch.zeros(config.num_experts)
            for place in sample:
                if config.router_score == "softmax":
                    scores = rows[place].softmax(0)
                    best = scores.topk(2).indices
                else:
                    scores = rows[place].sigmoid()
                    best = (scores + bias).topk(2).indices
                    scores = scores / scores.sum()
                chosen[best] += 1
                loads[layer, best] += 1
                shares = shares + scores / len(sample)
                z = z + rows[place].exp().sum().log() ** 2
            aux = aux + config.num_experts * (chosen / (2 * len(sample)) * shares).sum()
    return aux, z, loads


def losses_of_routers(world, config, recompute):
    """What a step reports and leaves, and the same by hand."""
    model, _, groups, _ = make_model(world, ParallelLayout(), model=config)
    for layer in model.decoder.layers:
        if config.router_bias:
            layer.mlp.router.expert_bias.copy_(torch.linspace(-0.2, 0.2, config.num_experts))
    part = pack([0, 1, 2], [torch.tensor(each) for each in SEQUENCES], PROMPT_LENGTHS, world.device)
    assert len(part.tokens) == 10
    logits = []

    def kept(router, hidden, gating=ExpertRouter.gating):
        logits.append(gating(router, hidden)[:, 0])
        return logits[-1][:, None]

    with mock.patch.object(ExpertRouter, "gating", kept):
        model(part.tokens, part.attention, part.rows)
    aux, z, loads = by_hand(model, config, logits)
    # Three samples, which have 13 tokens together.
    loss = MOE.aux_loss * aux / 3 + MOE.z_loss * z / 13
    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)
    recompute_activations(model, "actor", recompute)
    watch = RouterWatch(model, groups, MOE, [part])
    output = model(part.tokens, part.attention, part.rows)
    assert all(layer.mlp.router.routing is None for layer in model.decoder.layers), "a rollout on a GPU would obey it"
    (output.sum() * 0.0).backward()
    assert all(layer.mlp.router.routing is None for layer in model.decoder.layers), "the backward pass leaves it there"
    worst = 0.0
    for parameter, wanted in zip(parameters, expected, strict=True):
        wanted = torch.zeros_like(parameter) if wanted is None else wanted
        worst = max(worst, float((parameter.grad - wanted).abs().max()))
    assert max(float(each.abs().max()) for each in expected if each is not None) > 1e-2, "gradients tell nothing"
    biases = [layer.mlp.router.expert_bias for layer in model.decoder.layers]
    before = [None if bias is None else bias.clone() for bias in biases]
    found, told = watch.finish()
    for layer, bias in enumerate(biases):
        if bias is not None:
            mean = float(loads[layer].mean())
            steps = [0.125 if load < mean else -0.125 if load > mean else 0.0 for load in loads[layer].tolist()]
            assert torch.equal(bias, before[layer] + torch.tensor(steps)), layer
    layers = config.num_layers
    ratios = loads / loads.mean(1, keepdim=True)
    assert told == {layer: pytest.approx(shares) for layer, shares in enumerate(ratios.tolist())}
    wanted = {
        "actor/router_aux_loss": float(aux) / (3 * layers),
        "actor/router_z_loss": float(z) / (13 * layers),
        "actor/expert_load_max": float(ratios.max()),
        "actor/expert_load_max_mean": float(ratios.amax(1).mean()),
        "actor/expert_load_min": float(ratios.min()),
    }
    return worst, found, wanted


# Experts in every layer, and no groups of them.
FREE = dict(num_dense_layers=0, dense_ffn_hidden_size=None, router_groups=None, router_groups_per_token=None)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("config", [MIXTURE, replace(SHARED, **FREE)], ids=["softmax", "sigmoid"])
def test_losses_and_biases_are_those_of_the_formulas(config, recompute):
    ((worst, found, wanted),) = run_ranks(losses_of_routers, 1, replace(config, num_layers=2), recompute)
    assert worst < 1e-6
    assert found == pytest.approx(wanted, rel=1e-5)


def told_in_layout(world, text):
    """What routers of a mixture tell of three samples in a layout, and their biases after it."""
    layout, config = ParallelLayout.parse(text), replace(SHARED, **FREE, num_layers=2)
    model, mesh, groups, _ = make_model(world, layout, model=config)
    routers = [layer.mlp.router for layer in model.decoder.layers]
    for router in routers:
        router.expert_bias.copy_(torch.linspace(-0.2, 0.2, config.num_experts))
    mine = [*range(3)][mesh.coordinate(world.rank).dp :: layout.dp]
    context = groups.cp if layout.cp > 1 else None
    part = pack(mine, [torch.tensor(each) for each in SEQUENCES], PROMPT_LENGTHS, world.device, context)
    watch = RouterWatch(model, groups, MOE, [part])
    model(part.tokens, part.attention, part.rows)
    metrics, loads = watch.finish()
    return metrics, loads, [router.expert_bias.tolist() for router in routers]


def test_what_routers_tell_and_learn_is_the_same_in_every_layout():
    ((metrics, loads, biases),) = run_ranks(told_in_layout, 1, "tp1")
    for text in ("dp2", "cp2", "tp2.ep2.etp1"):
        for found in run_ranks(told_in_layout, 2, text):
            assert found[0] == pytest.approx(metrics, rel=1e-5), text
            assert found[1] == {layer: pytest.approx(shares) for layer, shares in loads.items()}, text
            assert found[2] == [pytest.approx(each) for each in biases], text


def choices_in_bf16(world, config):
    """How many choices for hidden states in bf16 differ from those of transformers, and how far weights differ."""
    model, *_ = make_model(world, ParallelLayout(), model=config)
    router = model.decoder.layers[-1].mlp.router
    router.expert_bias.copy_(torch.linspace(-0.2, 0.2, config.num_experts))
    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(
            **{"n_routed_experts": config.num_experts, "num_experts_per_tok": config.experts_per_token},
            **{"n_group": config.router_groups, "topk_group": config.router_groups_per_token},
            **{"hidden_size": config.hidden_size, "routed_scaling_factor": config.routed_scaling},
            norm_topk_prob=config.normalized_experts,
        )
    )
    theirs.load_state_dict({"weight": router.weight, "e_score_correction_bias": router.expert_bias})
    hidden = torch.randn(500, 1, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        _, shares, experts = theirs(hidden)
        expected, order = experts.sort(1)
        weights, chosen = router(hidden)
    return int((chosen != expected).sum()), float((weights / shares.gather(1, order) - 1).abs().max())


def test_scores_of_sigmoid_are_computed_in_fp32_as_in_transformers():
    ((num_others, distance),) = run_ranks(choices_in_bf16, 1, replace(SHARED, dtype="bf16"))
    assert num_others == 0 and distance < 1e-5


def noisy(router, scores, choose=ExpertRouter.choose):
    """What other kernels' rounding does to choices, made large enough for a small model."""
    noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(len(scores)))
    return choose(router, scores + 0.3 * scores.std() * noise)


def replayed(world, texts):
    """Layout -> sampled and computed log-probabilities with and without the rollout's choices, and the agreement."""
    found = {}
    for text in texts:
        layout = ParallelLayout.parse(text)
        model, mesh, groups, _ = make_model(world, layout, model=MIXTURE)
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=11, max_concurrent=4, keeps_choices=True)
        params = SamplingParams(max_new_tokens=20, stop_ids=(2,))
        mine = nine_requests(params)[mesh.coordinate(world.rank).dp :: layout.dp]
        responses = engine.generate(mine)
        sequences = [torch.cat([ask.prompt, got.tokens]) for ask, got in zip(mine, responses, strict=True)]
        choices = [got.choices for got in responses]
        batch = Batch(
            torch.arange(len(mine)), {ROUTER_CHOICES: Ragged(torch.cat(choices), torch.tensor([*map(len, choices)]))}
        )
        unknown = unknown_choice(choice_dtype(MIXTURE.num_experts))
        for tokens, rows in zip(sequences, choices, strict=True):
            assert rows.shape == (len(tokens), MIXTURE.num_layers, 2)
            assert (rows[:-1] < MIXTURE.num_experts).all() and (rows[-1] == unknown).all()

        def compute(output, part, group=groups.tp):
            return vocab_parallel_log_probs(output, part.targets, group=group, vocab_size=VOCAB)[0]

        def log_probs(
            *,
            is_replayed: bool,
            computed=compute,
            model=model,
            groups=groups,
            mine=mine,
            batch=batch,
            sequences=sequences,
        ):
            part = pack([*range(len(mine))], sequences, [len(ask.prompt) for ask in mine], world.device)
            attach_choices([part], batch, groups, model, is_replayed=is_replayed)
            with mock.patch.object(ExpertRouter, "choose", noisy):
                watch = RouterWatch(model, groups, MoEConfig(), [part])
                rows = forward_only(model, groups, [part], computed)
                return rows, watch.finish()[0]

        (with_replay, _), (without, told) = log_probs(is_replayed=True), log_probs(is_replayed=False)
        if with_replay:
            sampled = torch.cat([got.log_probs for got in responses])
            differences = [float((each[0] - sampled).abs().max()) for each in (with_replay, without)]
            found[text] = (*differences, told["rollout/router_agreement"])
    return found


@pytest.mark.parametrize(
    ("size", "texts"),
    [
        (1, ["tp1"]),
        (2, ["pp2", "dp2.ep2"]),
        pytest.param(4, ["tp2.dp2", "pp2.dp2.ep2", "tp2.dp2.ep4.etp1"], marks=pytest.mark.slow),
    ],
)
def test_the_rollouts_choices_give_its_log_probs(size, texts):
    found = [each for rank in run_ranks(replayed, size, texts) for each in rank.items()]
    assert {text for text, _ in found} == set(texts)
    for text, (with_replay, without, agreement) in found:
        assert with_replay < 1e-5, text
        assert without > 1e-2, text
        assert 0.5 < agreement < 0.999, text

"""Our GPT computes what Hugging Face's models of the same weights compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridflow.families.model import Model
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.microbatch import pack
from hybridflow.models.training import forward_only
from hybridflow.models.weights import local_shards
from hybridflow.parallel.layout import ParallelLayout
from tests.multi.jobs import inner_of, outer_of
from tests.multi.models import VOCAB, make_model, samples
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = dict(num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, max_context=32)
FAMILIES = {
    "llama": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        Model(**SHAPE, rotary_base=50000.0, vocab_divisible_by=4),
    ),
    "llama, grouped and tied": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        Model(**SHAPE, num_query_groups=1, tied_embeddings=True, vocab_divisible_by=4, norm_eps=1e-6),
    ),
    "qwen2": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        Model(**SHAPE, num_query_groups=2, qkv_bias=True, tied_embeddings=True, vocab_divisible_by=4),
    ),
    "qwen3": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        Model(**SHAPE, num_query_groups=4, head_dim=12, qk_norm=True, vocab_divisible_by=4),
    ),
}


def their_model(family: str) -> nn.Module:
    """Hugging Face's model of our shape, every weight random, norms and biases too."""
    make_config, make, model = FAMILIES[family]
    groups = model.num_query_groups or model.num_attention_heads
    theirs = make(
        make_config(
            vocab_size=VOCAB,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=groups,
            head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
            max_position_embeddings=model.max_context,
            rms_norm_eps=model.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base},
            tie_word_embeddings=model.tied_embeddings,
        )
    )
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in theirs.parameters():
            centre = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape, generator=generator))
    return theirs.eval()


def by_our_names(theirs: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Their weights as our logical tensors."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    groups = model.num_query_groups or model.num_attention_heads
    for layer in range(model.num_layers):
        mine, other = f"decoder.layers.{layer}", f"model.layers.{layer}"
        ours |= {
            f"{mine}.input_layernorm.weight": theirs[f"{other}.input_layernorm.weight"],
            f"{mine}.pre_mlp_layernorm.weight": theirs[f"{other}.post_attention_layernorm.weight"],
            f"{mine}.self_attention.linear_proj.weight": theirs[f"{other}.self_attn.o_proj.weight"],
            f"{mine}.mlp.linear_fc2.weight": theirs[f"{other}.mlp.down_proj.weight"],
            f"{mine}.mlp.linear_fc1.weight": torch.stack(
                [theirs[f"{other}.mlp.{half}_proj.weight"] for half in ("gate", "up")]
            ),
        }
        for kind in ("weight", "bias"):
            parts = [theirs.get(f"{other}.self_attn.{which}_proj.{kind}") for which in "qkv"]
            if parts[0] is not None:
                by_group = [part.view(groups, -1, *part.shape[1:]) for part in parts]
                ours[f"{mine}.self_attention.linear_qkv.{kind}"] = torch.cat(by_group, dim=1).flatten(0, 1)
        for which in "qk":
            norm = theirs.get(f"{other}.self_attn.{which}_norm.weight")
            if norm is not None:
                ours[f"{mine}.self_attention.{which}_layernorm.weight"] = norm
    return ours


def differences(world, layout: ParallelLayout) -> dict[str, tuple[float, float]]:
    """Family -> largest difference of a logit in this rank's columns, and of a log-probability; on the last stage."""
    found = {}
    sequences, _ = samples(5, seed=2)
    for family, (_, _, shape) in FAMILIES.items():
        theirs = their_model(family)
        model, mesh, groups, spec = make_model(world, layout, model=shape)
        weights = by_our_names(theirs.state_dict(), shape)
        for name, (local, part) in local_shards(model, spec, mesh, world.rank).items():
            local.zero_()
            local[inner_of(part)] = weights[name][outer_of(part)]
        chosen = [index for index, sequence in enumerate(sequences) if len(sequence) > 1]
        batch = pack(chosen, sequences, [1] * len(sequences), world.device)

        def compute(output, batch, groups=groups):
            log_probs, _ = vocab_parallel_log_probs(output, batch.targets, group=groups.tp, vocab_size=VOCAB)
            return output, log_probs

        with torch.no_grad():
            logits = torch.cat([theirs(sequences[index][None]).logits[0, :-1] for index in chosen])
        expected = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
        for output, log_probs in forward_only(model, groups, [batch], compute):
            first = mesh.coordinate(world.rank).tp * output.shape[1]
            mine = logits[:, first : first + output.shape[1]]
            assert mine.shape[1] > 0
            found[family] = (
                float((output[:, : mine.shape[1]] - mine).abs().max()),
                float((log_probs - expected).abs().max()),
            )
            assert float(logits.std()) > 0.5, "logits are too alike to tell anything"
    return found


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2, pp=2)], ids=str)
def test_logits_and_log_probs_are_those_of_hugging_face(layout):
    ranks = run_ranks(differences, layout.world_size, layout)
    assert [len(found) for found in ranks] == [0] * (layout.world_size - layout.tp) + [len(FAMILIES)] * layout.tp
    worst = {family: max(found[family] for found in ranks if found) for family in FAMILIES}
    assert all(max(pair) <= 1e-4 for pair in worst.values()), worst

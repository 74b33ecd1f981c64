#!/usr/bin/env python3
"""Print tables of a PPO step's estimated time by the number of GPUs, each with the best placement that is found.

Actor, critic, reference and reward model have one size. Strong scaling keeps 1,024 responses in a step, weak scaling
has 8 for each GPU. Prompts and responses have 1,024 tokens, as in arXiv 2409.19256, and a step has 8 updates.

Examples:
  python tools/table_scaling.py
  python tools/table_scaling.py --weak --models 34b --gpus 64,256
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.mapping.auto import placed
from hybridflow.mapping.hardware import RANKS_PER_NODE, hardware, hardware_names
from hybridflow.mapping.rl_step import Texts
from hybridflow.mapping.search import USABLE, Found, Request, search
from hybridflow.recipe.load import load_recipe
from hybridflow.trainer.plan import training_step

TOKENS = 1024
RESPONSES = 1024
UPDATES = 8
PER_GPU = 8
SHAPES = {
    "7b": (32, 4096, 11008, 32, 32),
    "13b": (40, 5120, 13824, 40, 40),
    "34b": (48, 8192, 22016, 64, 8),
    "70b": (80, 8192, 28672, 64, 8),
}
"""Layers, hidden size, width of the feed-forward block, heads, key/value heads."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="7b,34b,70b", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--gpus", default="8,16,32,64,128,256,512,1024", help="numbers of GPUs")
    parser.add_argument("--hardware", default="h100-sxm", choices=hardware_names())
    parser.add_argument("--weak", action="store_true", help="8 responses for each GPU in the place of 1,024")
    arguments = parser.parse_args()
    print("| model | GPUs | responses | step | tokens/s a GPU | together | split | best |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.models.split(","):
        for num_gpus in map(int, arguments.gpus.split(",")):
            for row in _rows(name, num_gpus, arguments):
                print(f"| {' | '.join(row)} |", flush=True)


def _rows(name: str, num_gpus: int, arguments: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    responses = PER_GPU * num_gpus if arguments.weak else RESPONSES
    found = best_placements(name, num_gpus, responses, arguments.hardware)
    start = (name.upper(), str(num_gpus), str(responses))
    if not found:
        yield (*start, *["–"] * 4, "nothing fits")
        return
    best = found[0]
    together, split = (
        next((f"{each.seconds:.4g} s" for each in found if (len(each.placement) == 1) == is_one), "–")
        for is_one in (True, False)
    )
    sets = "together" if len(best.placement) == 1 else placed(best, "; ")
    rate = 2 * TOKENS * responses / best.seconds / num_gpus
    yield (*start, f"{best.seconds:.4g} s", f"{rate:.0f}", together, split, sets)


def best_placements(name: str, num_gpus: int, responses: int, machine: str) -> list[Found]:
    """Return the best configurations for a PPO step with four models of a size, the fastest first."""
    with tempfile.TemporaryDirectory() as folder:
        path = _write_recipe(Path(folder), name, responses)

        def load(overrides: Sequence[str]) -> Recipe:
            return load_recipe(path, overrides)

        request = Request(
            load=load,
            flow=lambda recipe: training_step(recipe).flow,
            hardware=hardware(machine),
            texts=Texts(prompt=TOKENS, responses=(TOKENS,) * responses),
            num_ranks=num_gpus,
            ranks_per_node=RANKS_PER_NODE,
            memory_bytes=USABLE * hardware(machine).memory_bytes,
        )
        return search(request)


def _write_recipe(folder: Path, name: str, responses: int) -> Path:
    layers, hidden, ffn, heads, groups = SHAPES[name]
    model = {
        **{"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads},
        **{"num_query_groups": groups, "max_context": 2 * TOKENS, "vocab_size": 32000, "dtype": "bf16"},
    }
    scorer: dict[str, Any] = {
        **{"architectures": ["LlamaForSequenceClassification"], "model_type": "llama", "num_hidden_layers": layers},
        **{"hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "hidden_act": "silu"},
        **{"num_key_value_heads": groups, "max_position_embeddings": 2 * TOKENS, "vocab_size": 32000},
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_labels": 1, "torch_dtype": "bfloat16"},
    }
    (folder / "config.json").write_text(json.dumps(scorer), encoding="utf-8")
    optimizer = {"optimizer": {"lr": 1e-6}}
    recipe = {
        **{"name": name, "algorithm": "ppo", "cluster": {"ranks": 8}, "model": model},
        **{"data": {"train": "train.jsonl"}, "tokenizer": {"path": "tokenizer"}, "kl": {"coef": 0.01}},
        **{"actor": {"update": {"tp": 8}, **optimizer}, "critic": {"layout": {"tp": 8}, **optimizer}},
        **{"reward": {"model": {"path": str(folder)}}, "rollout": {"group_size": 1, "max_new_tokens": TOKENS}},
        "trainer": {
            **{"steps": 1, "global_batch_size": responses, "mini_batch_size": responses // UPDATES},
            "micro_batch_tokens": 2 * TOKENS,
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


if __name__ == "__main__":
    main()

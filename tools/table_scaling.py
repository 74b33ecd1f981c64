#!/usr/bin/env python3
"""Print and draw the estimated time of a step by the number of GPUs, each with the best placement that is found.

7b to 70b are PPO with actor, critic, reference and reward model of one size, 235b is GRPO of Qwen3-235B-A22B. Strong
scaling keeps 1,024 responses in a step, weak scaling has 8 for each GPU. Prompts and responses have 1,024 tokens, as in
arXiv 2409.19256, and a step has 8 updates. With --rows what was found is kept in a file, and not searched again.
--even is for systems that cut batches into equal parts alone, and --cache-memory 0.9 for those that generate with vLLM,
which takes 0.9 of a GPU unless told otherwise, as that of the paper does.

Examples:
  python tools/table_scaling.py --models 7b --gpus 8
  python tools/table_scaling.py --hardware a100-80g-one-port --models 13b,34b --gpus 64,96,128 --blocks 16 --even \
      --cache-memory 0.9
  python tools/table_scaling.py --rows docs/pictures/scaling.jsonl --draw docs/pictures
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.config.rollout import RolloutConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.auto import placed
from hybridflow.mapping.choices import LEARNERS
from hybridflow.mapping.hardware import hardware
from hybridflow.mapping.memory import USABLE
from hybridflow.mapping.rl_step import Texts
from hybridflow.mapping.search import Found, SearchRequest, search
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
MIXTURE = "235b"
GPUS = "8,16,32,64,128,256,512,1024,2048,4096,8192,16384"

Row = dict[str, Any]
"""A line of the table: ``model``, ``gpus``, ``responses``, ``hardware``, ``even`` and ``cache_memory``, and the seconds
of the best found together and split, None where there is none, with its placement."""


def main() -> None:
    """Print the table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="7b,34b,70b,235b", help=f"some of {', '.join((*SHAPES, MIXTURE))}")
    parser.add_argument("--gpus", default=GPUS, help=f"numbers of GPUs (default: {GPUS})")
    parser.add_argument("--hardware", default="h100-sxm", help="as of `hybridflow plan auto`")
    parser.add_argument("--weak", action="store_true", help="8 responses for each GPU in the place of 1,024")
    parser.add_argument("--blocks", type=int, default=4, help="parts of the GPUs that models may have (default: 4)")
    parser.add_argument("--even", action="store_true", help="dp divides the responses of each call and update")
    parser.add_argument(
        "--cache-memory", type=float, default=RolloutConfig.cache_memory, metavar="SHARE", help="of what is free"
    )
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep what is found here, and use what is there")
    parser.add_argument("--draw", type=Path, metavar="DIRECTORY", help="draw all of --rows there; needs matplotlib")
    arguments = parser.parse_args()
    if arguments.draw is not None:
        # Now, since the search may take minutes.
        arguments.draw.mkdir(parents=True, exist_ok=True)
    print("| model | GPUs | responses | step | tokens/s a GPU | together | split | best |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.models.split(","):
        for num_gpus in map(int, arguments.gpus.split(",")):
            print(f"| {' | '.join(cells(row_of(name, num_gpus, arguments)))} |", flush=True)
    if arguments.draw is not None:
        draw(_kept(arguments.rows), arguments.draw)


def row_of(name: str, num_gpus: int, arguments: argparse.Namespace) -> Row:
    """Return what is kept of one number of GPUs, or search and keep it."""
    responses = PER_GPU * num_gpus if arguments.weak else RESPONSES
    row: Row = {"model": name, "gpus": num_gpus, "responses": responses, "hardware": arguments.hardware}
    row |= {"even": arguments.even, "cache_memory": arguments.cache_memory}
    for kept in _kept(arguments.rows):
        if row.items() <= kept.items():
            return kept
    found = best_placements(
        *(name, num_gpus, responses, arguments.hardware, arguments.blocks),
        is_even=arguments.even,
        cache_memory=arguments.cache_memory,
    )
    row |= {"together": None, "split": None, "placement": None}
    for each in reversed(found):
        row["together" if len(each.placement) == 1 else "split"] = each.seconds
        row["placement"] = "together" if len(each.placement) == 1 else placed(each, "; ")
    if arguments.rows is not None:
        with arguments.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return row


def _kept(path: Path | None) -> list[Row]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def least(row: Row) -> float | None:
    """Return the seconds of the best, if anything fits."""
    return min((value for value in (row["together"], row["split"]) if value is not None), default=None)


def rate(row: Row) -> float:
    """Return the tokens a second of each GPU."""
    return 2 * TOKENS * row["responses"] / (least(row) or float("inf")) / row["gpus"]


def cells(row: Row) -> tuple[str, ...]:
    """Return a line of the table."""
    start = (row["model"].upper(), str(row["gpus"]), str(row["responses"]))
    seconds = least(row)
    if seconds is None:
        return (*start, *["–"] * 4, "nothing fits")
    together, split = ("–" if row[kind] is None else f"{row[kind]:.4g} s" for kind in ("together", "split"))
    return (*start, f"{seconds:.4g} s", f"{rate(row):.0f}", together, split, row["placement"])


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draw the tokens a second of all GPUs by their number, as ``scaling_strong.svg`` and ``scaling_weak.svg``."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "hybridflow", "svg.fonttype": "none"})
    from matplotlib import pyplot

    for name, is_weak in (("strong", False), ("weak", True)):
        # One number of GPUs has as many responses in both.
        wanted = (row for row in rows if row["responses"] == (PER_GPU * row["gpus"] if is_weak else RESPONSES))
        drawn = [row for row in wanted if least(row)]
        if not drawn:
            continue
        figure, axes = pyplot.subplots(figsize=(6.4, 4))
        for model in dict.fromkeys(row["model"] for row in drawn):
            mine = [row for row in drawn if row["model"] == model]
            mine.sort(key=lambda row: row["gpus"])
            (line,) = axes.plot(
                [row["gpus"] for row in mine], [rate(row) * row["gpus"] for row in mine], label=model.upper()
            )
            for is_split, marker in ((False, "o"), (True, "s")):
                marked = [row for row in mine if (row["placement"] != "together") == is_split]
                places = [row["gpus"] for row in marked], [rate(row) * row["gpus"] for row in marked]
                axes.plot(*places, marker, color=line.get_color(), fillstyle="none" if is_split else "full")
        axes.set(yscale="log", xlabel="GPUs", ylabel="tokens a second")
        axes.set_xscale("log", base=2)
        axes.set_title(f"{name.capitalize()} scaling, estimated: disks are together, squares split")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(folder / f"scaling_{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def best_placements(
    name: str,
    num_gpus: int,
    responses: int,
    machine: str,
    blocks: int = 16,
    *,
    is_even: bool = False,
    cache_memory: float = RolloutConfig.cache_memory,
) -> list[Found]:
    """Return the best configurations for a step with models of a size, the fastest first."""

    def allows(mesh: str, layout: ParallelLayout) -> bool:
        return not is_even or (responses // (UPDATES if mesh in LEARNERS else 1)) % layout.dp == 0

    with tempfile.TemporaryDirectory() as folder:
        write = _write_mixture if name == MIXTURE else _write_recipe
        path = write(Path(folder), name, responses)

        def load(overrides: Sequence[str]) -> Recipe:
            return load_recipe(path, [f"rollout.cache_memory={cache_memory}", *overrides])

        request = SearchRequest(
            load=load,
            flow=lambda recipe: training_step(recipe).flow,
            hardware=hardware(machine),
            texts=Texts(prompt=TOKENS, responses=(TOKENS,) * responses),
            num_ranks=num_gpus,
            ranks_per_node=hardware(machine).ranks_per_node,
            memory_bytes=USABLE * hardware(machine).memory_bytes,
            blocks=blocks,
            allows=allows,
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


def _write_mixture(folder: Path, name: str, responses: int) -> Path:
    model = {
        **{"num_layers": 94, "hidden_size": 4096, "ffn_hidden_size": 1536, "num_attention_heads": 64},
        **{"num_query_groups": 4, "head_dim": 128, "max_context": 2 * TOKENS, "vocab_size": 151936, "qk_norm": True},
        **{"num_experts": 128, "experts_per_token": 8, "normalized_experts": True, "dtype": "bf16"},
    }
    recipe = {
        **{"name": name, "algorithm": "grpo", "cluster": {"ranks": 4}, "model": model},
        **{"data": {"train": "train.jsonl"}, "tokenizer": {"path": "tokenizer"}, "kl": {"coef": 0.001}},
        **{"actor": {"update": {"tp": 4}, "optimizer": {"lr": 1e-6}}, "reward": {"function": "maths"}},
        "rollout": {"group_size": 8, "max_new_tokens": TOKENS},
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

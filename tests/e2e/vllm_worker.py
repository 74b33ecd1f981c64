"""Run by vLLM's own environment: a worker of the Python API on vLLM beside one on our engine.

python vllm_worker.py        prints one line of JSON at the end
"""

import json

import torch
import transformers

from hybridflow.api.rollout_worker import RolloutWorker

PROMPTS = [[3, 4, 5, 6], [7], [20, 21, 22, 23, 24]]


def make_model(seed):
    """A tiny Llama with random weights; the CPU attention of vLLM knows no smaller heads."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=45, num_key_value_heads=2, head_dim=32, max_position_embeddings=64, initializer_range=0.3, **sizes
    )
    return transformers.LlamaForCausalLM(config).float().eval()


def greedy(worker):
    found = worker.generate(PROMPTS, max_new_tokens=8, do_sample=False, stop_ids=[])
    return [each.tokens.tolist() for each in found], [each.log_probs.tolist() for each in found]


if __name__ == "__main__":
    first, second = make_model(1), make_model(2)
    told = {}
    for engine in ("megatron", "vllm"):
        worker = RolloutWorker(first, engine=engine)
        before = greedy(worker)
        worker.update_weights(second)
        told[engine] = [before, greedy(worker)]
    print(json.dumps(told))

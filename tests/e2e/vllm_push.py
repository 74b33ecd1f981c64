"""Run by vLLM's own environment: pushes weights into vLLM in this process, and compares with ``transformers``.

python vllm_push.py        prints one line of JSON at the end
"""

import json
from dataclasses import replace

import torch
import transformers

from hybridflow.checkpoint.formats.forms import to_logical
from hybridflow.checkpoint.formats.huggingface import parts_of
from hybridflow.families.config_json import read_config
from hybridflow.rollout.engines.hf_weights import hf_weights
from hybridflow.rollout.engines.vllm_engine import VllmEngine, config_of
from hybridflow.rollout.request import Request, RolloutStopped, SamplingParams

VOCAB, NUM_TOKENS = 45, 12
PROMPTS = [[3, 4, 5, 6], [7], [20, 21, 22, 23, 24, 25, 26, 27, 28], list(range(3, 36))]


def make_model(seed):
    """A tiny Llama with random weights; the CPU attention of vLLM knows no smaller heads."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        eos_token_id=0,
        bos_token_id=1,
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).float().eval()


def logical(model, described):
    """The weights as the project holds them."""
    state = model.state_dict()
    return {
        name: to_logical(parts.form, [state[part] for part in parts.names], described.model)
        for name, parts in parts_of(described).items()
    }


def log_probs(model, prompt, tokens, temperature):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    scores = (logits / temperature).log_softmax(-1)
    return scores[:-1].gather(1, torch.tensor([*prompt, *tokens])[1:, None])[:, 0], logits


def compare(engine, model, params, temperature):
    """The greatest distance of log-probabilities, the same of prompts, and how far a token was from the likeliest."""
    requests = [
        Request(prompt=torch.tensor(prompt), params=params, prompt_index=prompt_index)
        for prompt_index, prompt in enumerate(PROMPTS)
    ]
    distance, of_prompts, short = 0.0, 0.0, 0.0
    responses = engine.generate(requests)
    for prompt, got in zip(PROMPTS, responses, strict=True):
        assert got.finish == "length" and len(got.tokens) == NUM_TOKENS, got
        right, logits = log_probs(model, prompt, got.tokens.tolist(), temperature)
        right, of_prompt = right[len(prompt) - 1 :], right[: len(prompt) - 1]
        distance = max(distance, (got.log_probs - right).abs().max().item())
        assert torch.equal(got.log_probs, got.sampled_log_probs)
        if got.prompt_log_probs is not None and len(prompt) > 1:
            of_prompts = max(of_prompts, (got.prompt_log_probs - of_prompt).abs().max().item())
        rows = logits[len(prompt) - 1 : -1]
        short = max(short, (rows.max(1).values - rows.gather(1, got.tokens[:, None])[:, 0]).max().item())
    return {"log_probs": distance, "prompt": of_prompts, "short": short}, [got.tokens.tolist() for got in responses]


class Stopping:
    """Says to stop once something is finished."""

    def __init__(self):
        self.pairs = []

    def finished(self, pairs):
        self.pairs += pairs

    def is_stopping(self):
        return bool(self.pairs)


def main():
    first, second = make_model(1), make_model(2)
    described = read_config(first.config.to_dict(), where="test")
    described = replace(described, model=replace(described.model, dtype="fp32"))
    engine = VllmEngine(
        described.model,
        config_of(described),
        log_probs="processed",
        seed=1,
        vocab_size=VOCAB,
        max_concurrent=8,
        memory_share=0.5,
        device=torch.device("cpu"),
        cache_bytes=1 << 26,
    )
    greedy = SamplingParams(max_new_tokens=NUM_TOKENS, greedy=True, with_prompt_log_probs=True)
    drawn = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.7)
    found = {}
    # The first again at the end: nothing of the second may be left, in the cache of prefixes either.
    for name, model in {"first": first, "second": second, "again": first}.items():
        engine.load(hf_weights(described, logical(model, described).__getitem__))
        found[name], greedy_tokens = compare(engine, model, greedy, 1.0)
        found[f"{name}_drawn"], tokens = compare(engine, model, drawn, 0.7)
        found[f"{name}_tokens"] = [greedy_tokens, tokens]
    cut = SamplingParams(max_new_tokens=4, top_k=1)
    (got,) = engine.generate([Request(prompt=torch.tensor(PROMPTS[0]), params=cut, prompt_index=0)])
    found["cut"] = [got.log_probs.isnan().all().item(), got.sampled_log_probs.abs().max().item()]
    stop = found["first_tokens"][0][0][5]
    ends = replace(greedy, stop_ids=(stop,), with_prompt_log_probs=False)
    (got,) = engine.generate([Request(prompt=torch.tensor(PROMPTS[0]), params=ends, prompt_index=0)])
    found["stopped"] = [got.finish, got.tokens.tolist(), found["first_tokens"][0][0], stop]
    requests = [
        Request(
            prompt=torch.tensor(PROMPTS[0]), params=SamplingParams(max_new_tokens=most, greedy=True), prompt_index=most
        )
        for most in (2, 50)
    ]
    stopping = Stopping()
    try:
        engine.generate(requests, progress=stopping)
    except RolloutStopped as stopped:
        found["unfinished"] = [request.prompt_index for request, _ in stopped.unfinished]
    found["after"] = len(engine.generate(requests))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

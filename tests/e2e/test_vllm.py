"""vLLM on exported directories, and as the rollout's engine: behind HTTP, on pushed weights, and within the actor.

What it says is held against ``transformers``.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sysconfig
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from hybridflow.config.rollout import SamplingEngineConfig
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.rollout.request import Request, SamplingParams
from hybridflow.sampling.engines import make_server_engine
from tests.support.conversions import convert
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.plain_models import greedy, token_log_probs
from tests.support.vllm_environment import NEEDED, PYTHON, ROOT, environ, printed_by

TOLERANCE = 1e-4
PROMPTS = [[3, 4, 5, 6], [7], [20, 21, 22, 23, 24, 25, 26, 27, 28]]

pytestmark = NEEDED


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model, and the address of a server of it that wants a token."""
    folder = tmp_path_factory.mktemp("served")
    # The CPU attention of vLLM knows no smaller heads.
    model = write_model(folder / "model", seed=4, hidden_size=128, intermediate_size=96, head_dim=32)
    write_tokenizer(folder / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = "--dtype float32 --enforce-eager --max-model-len 64 --max-num-seqs 8 --served-model-name tiny"
    command = [
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / "model"),
        *("--host", "127.0.0.1", "--port", str(port), "--api-key", "the-token"),
        *("--logprobs-mode", "processed_logprobs", *options.split()),
    ]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, env=environ(), cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(f"http://127.0.0.1:{port}/health", server, folder / "log")
            yield model, folder / "model", f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def _wait(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM does not serve: {log.read_text()[-4000:]}")


def scores(model, tokens: list[int], temperature: float) -> torch.Tensor:
    """Log-probability of each token but the first."""
    with torch.no_grad():
        return token_log_probs(model(torch.tensor([tokens])).logits[0], torch.tensor(tokens), temperature)


def test_a_real_server(served, monkeypatch):
    model, folder, url = served
    monkeypatch.setenv("VLLM_TOKEN", "the-token")
    settings = SamplingEngineConfig(
        kind="openai", urls=(url,), auth_env="VLLM_TOKEN", log_probs="processed", max_in_flight=6, retries=1
    )
    engine = make_server_engine(settings, tokenizer=open_tokenizer(folder), seed=1, vocab_size=45)
    drawn = SamplingParams(max_new_tokens=10, temperature=0.7, with_prompt_log_probs=True)
    requests = [
        Request(prompt=torch.tensor(prompt), params=drawn, prompt_index=prompt_index, index=index)
        for prompt_index, prompt in enumerate(PROMPTS)
        for index in range(4)
    ]
    responses = engine.generate(requests)
    for request, got in zip(requests, responses, strict=True):
        assert got.finish == "length" and len(got.tokens) == 10, got.error
        prompt = request.prompt.tolist()
        right = scores(model, [*prompt, *got.tokens.tolist()], 0.7)[len(prompt) - 1 :]
        torch.testing.assert_close(got.log_probs, right, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(got.prompt_log_probs, scores(model, prompt, 1.0), atol=TOLERANCE, rtol=0)
    assert len({tuple(got.tokens.tolist()) for got in responses}) > len(PROMPTS), "samples of a group differ"
    assert [got.tokens.tolist() for got in engine.generate(requests)] == [got.tokens.tolist() for got in responses]

    # Every token is some request's stop token, once it is known what comes.
    stop = responses[0].tokens[4].item()
    first = responses[0].tokens.tolist().index(stop)
    ends = replace(drawn, stop_ids=(stop,), with_prompt_log_probs=False)
    (got,) = engine.generate([replace(requests[0], params=ends)])
    assert got.finish == "stop" and got.tokens.tolist() == responses[0].tokens.tolist()[: first + 1]

    every = SamplingParams(
        max_new_tokens=6,
        min_new_tokens=2,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=((9, 100.0),),
        stop=("never said",),
        seed=3,
    )
    (got,) = engine.generate([Request(prompt=torch.tensor(PROMPTS[0]), params=every, prompt_index=0)])
    # What is so strongly wanted is all that comes.
    assert got.tokens.tolist() == [9] * 6 and got.log_probs.isnan().all()
    torch.testing.assert_close(got.sampled_log_probs, torch.zeros(6), atol=1e-5, rtol=0)

    # The context has 64 tokens: the first leaves too few, of which the server says nothing, the second none.
    long = [Request(prompt=torch.arange(size) % 40 + 3, params=drawn, prompt_index=size) for size in (60, 70)]
    good, short, none = engine.generate([requests[0], *long])
    assert good.finish == "length" and short.finish == none.finish == "failed"
    assert "found 4 tokens and the end 'length', expected 10" in short.error and "answered 400" in none.error
    engine.close()


def told_by(script: str, *arguments: Path, packages: Path, folder: Path) -> dict:
    """What a program of vLLM's environment prints at its end; it finds packages there, and works in the folder."""
    command = [PYTHON, ROOT / "tests/e2e" / script, *arguments]
    return json.loads(printed_by(command, packages, folder=folder).splitlines()[-1])


def test_pushed_weights(tmp_path):
    found = told_by("vllm_push.py", packages=ROOT, folder=tmp_path)
    for name in ("first", "second", "again"):
        assert found[name]["log_probs"] < TOLERANCE and found[name]["prompt"] < TOLERANCE
        # No greedy token is further from the likeliest than two sums in another order can be.
        assert found[name]["short"] < 1e-3
        assert found[f"{name}_drawn"]["log_probs"] < TOLERANCE
    assert found["first_tokens"] == found["again_tokens"] != found["second_tokens"]
    are_unknown, furthest = found["cut"]
    assert are_unknown and furthest < 1e-5, "the likeliest token alone has probability 1"
    finish, tokens, whole, stop = found["stopped"]
    assert finish == "stop" and tokens == whole[: whole.index(stop) + 1]
    assert found["unfinished"] == [50] and found["after"] == 2


RECIPE = """
name: run
algorithm: grpo
cluster: {ranks: 2}
model: {num_layers: 2, hidden_size: 128, ffn_hidden_size: 96, num_attention_heads: 4, num_query_groups: 2, head_dim: 32,
  max_context: 64, init_std: 0.1}
data:
  train: train.jsonl
  held_out: held_out.jsonl
  arithmetic: {num_train: 60, num_held_out: 8, max_operand: 20}
actor:
  update: {tp: 2}
  rollout: {dp: 2}
  optimizer: {lr: 1.0e-2}
reward: {function: "rewards:letters"}
rollout: {max_new_tokens: 6, group_size: 4, max_concurrent: 8, temperature: 0.8, engine: {kind: vllm}}
trainer: {steps: 3, global_batch_size: 16, mini_batch_size: 8, micro_batch_tokens: 256}
"""


REWARDS = """
def letters(prompt, response, answer):
    # Responses to one prompt differ in it, whatever they are.
    return float(sum(map(ord, response)) % 7)
"""


def _said(code: str) -> str:
    return subprocess.check_output([PYTHON, "-c", code], text=True).strip()


def _link_package(folder: Path) -> None:
    """The package as it is installed: two of its parts lie beside it in the tree."""
    folder.mkdir()
    for part in (*(ROOT / "hybridflow").iterdir(), ROOT / "launch", ROOT / "slurm"):
        if not (folder / part.name).exists():
            (folder / part.name).symlink_to(part)


def both_environments(folder: Path) -> Path:
    """A directory with the package, and with what vLLM's environment lacks, such as megatron-core, from ours."""
    extra = folder / "extra"
    extra.mkdir()
    theirs = Path(_said("import sysconfig; print(sysconfig.get_path('purelib'))"))
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if each.suffix not in (".dist-info", ".pth") and each.name[:2] != "__" and not (theirs / each.name).exists():
            (extra / each.name).symlink_to(each)
    _link_package(extra / "hybridflow")
    return extra


@pytest.mark.parametrize(
    "trained",
    [
        pytest.param(("actor.lora.rank=4",), id="adapters"),
        pytest.param(("actor.update={fsdp: 2}", "actor.offload=always"), id="fsdp", marks=pytest.mark.long),
    ],
)
def test_the_actor_and_vllm_in_one_process(trained, tmp_path):
    """What vLLM samples has the log-probabilities of weights that have just been trained in another layout."""
    extra = both_environments(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "rewards.py").write_text(REWARDS)
    printed_by([PYTHON, "-m", "hybridflow", "train", "recipe.yaml", *trained], extra, folder=tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:
        assert 0 < step["rollout/logprob_abs_diff_max"] < TOLERANCE
        assert step["correction/bounded_share"] == 0 and step["correction/effective_share"] > 0.999
    assert any(step["actor/kl_to_old"] > 1e-3 for step in steps), "the weights are to move"


@pytest.mark.long
def test_a_model_without_a_table_is_sampled_from_by_vllm(tmp_path):
    """What vLLM samples has the log-probabilities of a module of ``transformers`` that has just been trained."""
    extra = both_environments(tmp_path)
    write_model(tmp_path / "model", "StableLm", seed=4, hidden_size=128, intermediate_size=96)
    write_tokenizer(tmp_path / "model")
    recipe = yaml.safe_load(RECIPE)
    recipe["model"] = {"path": "model", "max_context": 64, "dtype": "fp32"}
    recipe["actor"] = {"update": {"fsdp": 2}, "rollout": {"dp": 2}, "optimizer": {"lr": 1e-3}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    (tmp_path / "rewards.py").write_text(REWARDS)
    printed_by([PYTHON, "-m", "hybridflow", "train", "recipe.yaml"], extra, folder=tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3 and any(step["actor/kl_to_old"] > 1e-3 for step in steps), "the weights are to move"
    assert all(0 < step["rollout/logprob_abs_diff_max"] < TOLERANCE for step in steps)


def test_a_worker_on_vllm_generates_what_one_on_our_engine_does_and_follows_new_weights(tmp_path):
    found = told_by("vllm_worker.py", packages=both_environments(tmp_path), folder=tmp_path)
    for (ours, our_log_probs), (theirs, their_log_probs) in zip(found["megatron"], found["vllm"], strict=True):
        assert ours == theirs
        pairs = zip(sum(our_log_probs, []), sum(their_log_probs, []), strict=True)
        assert max(abs(one - other) for one, other in pairs) < TOLERANCE
    assert found["vllm"][0] != found["vllm"][1]


def test_a_policy_of_a_program_is_sampled_from_by_vllm(tmp_path):
    """What vLLM samples has the log-probabilities of the policy, while that leaves the reference behind."""
    write_model(tmp_path / "model", seed=4, hidden_size=128, intermediate_size=96, head_dim=32)
    write_model(tmp_path / "other", "StableLm", seed=4, hidden_size=128, intermediate_size=96)
    for name in ("model", "other"):
        write_tokenizer(tmp_path / name)
    folders, packages = (tmp_path / "model", tmp_path / "other"), both_environments(tmp_path)
    found = told_by("vllm_actor.py", *folders, packages=packages, folder=tmp_path)
    assert all(0 < step["rollout/logprob_abs_diff_max"] < TOLERANCE for step in found["without_table"])
    assert all(step["actor/grad_norm"] > 1e-3 for step in found["without_table"]), "the weights are to move"
    for name in ("trainer", "in_memory", "adapters"):
        steps = found[name]
        assert len(steps) == 3
        for step in steps:
            assert 0 < step["rollout/logprob_abs_diff_max"] < TOLERANCE
            # Told only of what others sampled: ours need no correction.
            assert step["correction/bounded_share"] == 0 and step["correction/effective_share"] > 0.999
        assert steps[0]["kl/ref"] == 0 and all(step["kl/ref"] > 1e-3 for step in steps[1:]), "the weights are to move"
    deciding = ("reward/mean", "kl/ref", "actor/grad_norm")
    assert [[step[name] for name in deciding] for step in found["trainer"]] == [
        [step[name] for name in deciding] for step in found["in_memory"]
    ]
    assert "found LLM" in found["refusal"] and f"vLLMActor({str(tmp_path / 'model')!r})" in found["refusal"]


SHAPE = dict(hidden_size=128, intermediate_size=96, head_dim=32)
FAMILIES = {"Llama": SHAPE, "Qwen2": {**SHAPE, "tie_word_embeddings": True}, "Qwen3": {**SHAPE, "hidden_size": 96}}
NUM_TOKENS = 16


def test_vllm_generates_from_exports(tmp_path):
    models, exports = [], []
    for family, shape in FAMILIES.items():
        folder = tmp_path / family
        models.append(write_model(folder / "first", family, seed=4, **shape))
        write_tokenizer(folder / "first")
        convert(folder / "first", "megatron", folder / "ours", layout=ParallelLayout(tp=2, pp=2))
        convert(folder / "ours", "hf", folder / "export", max_shard_bytes=100_000)
        assert len(list((folder / "export").glob("model-*.safetensors"))) > 2
        exports.append(folder / "export")
    command = [PYTHON, ROOT / "tests/e2e/vllm_generate.py", str(NUM_TOKENS), json.dumps(PROMPTS), *exports]
    every = json.loads(printed_by(command, folder=tmp_path).splitlines()[-1])
    for model, found in zip(models, every, strict=True):
        expected = [greedy(lambda ids: model(ids).logits, prompt, NUM_TOKENS, None)[0] for prompt in PROMPTS]  # noqa: B023
        assert sum(map(len, expected)) >= NUM_TOKENS, "too many near ties to tell anything"
        for tokens, right in zip(found["tokens"], expected, strict=True):
            assert len(tokens) == NUM_TOKENS and tokens[: len(right)] == right
        assert any(found["texts"]), "the tokenizer travelled along"

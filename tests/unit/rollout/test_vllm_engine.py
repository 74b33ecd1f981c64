"""vLLM within this process: where it runs, and in which order it is put to sleep, woken and given weights."""

import importlib
import sys
import types
from dataclasses import replace

import pytest
import torch

from hybridflow.families.config_json import describe
from hybridflow.families.model import ModelConfig, RotaryScaling
from hybridflow.rollout.request import Request, SamplingParams
from hybridflow.sampling import engines

MODEL = ModelConfig(num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=2, max_context=8, vocab_size=16)


class UniProcExecutor:
    """Stands in for vLLM's, which takes the first GPU."""

    def _distributed_args(self):
        return "tcp://a:1", 0, 0


class LLM:
    """Records what it is asked."""

    def __init__(self, **options):
        self.options, self.log = options, []
        self.llm_engine = types.SimpleNamespace(engine_core=None)

    def sleep(self, level):
        self.log.append(("sleep", level))

    def wake_up(self, tags):
        self.log.append(("wake", *tags))

    def collective_rpc(self, name, kwargs):
        self.log.append((name, *(each for each, _ in kwargs["weights_iterator"])))

    def reset_prefix_cache(self):
        self.log.append(("forget",))
        return True


@pytest.fixture
def make(monkeypatch):
    """A function that makes an engine on a device, of a vLLM that only records."""
    modules = {name: types.ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.executor")}
    modules["vllm"].LLM, modules["vllm"].__version__ = LLM, "0"
    executor = modules["vllm.v1.executor.uniproc_executor"] = types.ModuleType("vllm.v1.executor.uniproc_executor")
    executor.UniProcExecutor = UniProcExecutor
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    name = "hybridflow.rollout.engines.vllm_engine"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)

    def made(device, can_sleep=True):
        described = describe(replace(MODEL), family="llama", has_value_head=False)
        found = module.VllmEngine(
            described.model,
            module.config_of(described),
            log_probs="raw",
            seed=1,
            vocab_size=16,
            max_concurrent=2,
            memory_share=0.5,
            device=torch.device(device),
            can_sleep=can_sleep,
        )
        return found, found._llm

    yield made
    sys.modules.pop(name, None)


def test_it_runs_on_the_ranks_own_gpu(make):
    _, llm = make("cuda:3")
    executor = llm.options["distributed_executor_backend"]
    assert issubclass(executor, UniProcExecutor) and executor()._distributed_args() == ("tcp://a:1", 0, 3)
    assert make("cpu")[1].options["distributed_executor_backend"] == "uni"


def test_a_token_that_the_model_does_not_have_is_refused(make):
    engine, _ = make("cpu")
    request = Request(prompt=torch.tensor([3, 16]), params=SamplingParams(max_new_tokens=4), prompt_index=0)
    assert str(engine.refusal(request)).startswith("it has token 16; expected 0 to 15")
    assert engine.refusal(replace(request, prompt=torch.tensor([3, 15]))) is None


@pytest.mark.parametrize(("attention_factor", "expected"), [(None, 1.5), (1.25, 1.25)])
def test_the_factor_of_longrope_is_told(make, attention_factor, expected):
    """vLLM would take 1: the context is not longer than the original one. 1.5 = sqrt(1 + log(32) / log(16))."""
    engine = importlib.import_module("hybridflow.rollout.engines.vllm_engine")
    scaling = RotaryScaling(
        **dict(kind="longrope", factor=32.0, original_context=16, attention_factor=attention_factor),
        **dict(short_factor=(1.0, 2.0), long_factor=(3.0, 4.0)),
    )
    for family in ("llama", "phi3"):
        model = replace(MODEL, rotary_scaling=scaling, dtype="bf16")
        config = engine.config_of(describe(model, family=family, has_value_head=False))
        assert config["max_position_embeddings"] == 8
        for told in (config["rope_scaling"], config["rope_parameters"]):
            assert [told["short_mscale"], told["long_mscale"]] == pytest.approx([expected, expected])


def test_weights_come_before_the_room_for_the_cache_is_taken(make):
    engine, llm = make("cuda:0")
    assert llm.options["enable_sleep_mode"]
    engine.sleep(keeps_weights=False)
    engine.sleep(keeps_weights=False)
    assert engine.lacks_weights
    with pytest.raises(AssertionError, match="gone"):
        engine.wake(None)
    engine.wake(iter([("a", torch.zeros(1))]))
    assert llm.log == [("sleep", 2), ("wake", "weights"), ("reload_weights", "a"), ("forget",), ("wake", "kv_cache")]
    assert not engine.lacks_weights


def test_weights_that_are_kept_need_not_come_again(make):
    engine, llm = make("cuda:0")
    engine.sleep(keeps_weights=True)
    assert not engine.lacks_weights
    engine.wake(None)
    assert llm.log == [("sleep", 1), ("wake", "weights"), ("wake", "kv_cache")]


@pytest.mark.parametrize(("device", "can_sleep"), [("cpu", True), ("cuda:0", False)])
def test_where_it_cannot_sleep_it_only_takes_weights(make, device, can_sleep):
    engine, llm = make(device, can_sleep)
    assert not llm.options["enable_sleep_mode"]
    engine.sleep(keeps_weights=False)
    engine.wake(iter([("a", torch.zeros(1))]))
    engine.wake(None)
    assert llm.log == [("reload_weights", "a"), ("forget",)]


def job_of(device, *, temperature=1.0, reshard_every=1):
    """Of the recipe what the engine is made from."""
    engine = types.SimpleNamespace(memory_share=0.5)
    rollout = types.SimpleNamespace(temperature=temperature, max_concurrent=2, cache_memory=0.5, engine=engine)
    actor = types.SimpleNamespace(reshard_every=reshard_every)
    return types.SimpleNamespace(
        recipe=types.SimpleNamespace(rollout=rollout, actor=actor, seed=1),
        world=types.SimpleNamespace(device=torch.device(device), ranks_per_node=8, size=2),
        model_of=lambda name: MODEL,
        vocab_size=16,
    )


@pytest.fixture
def push(make, monkeypatch):
    """A function that makes what pushes an actor's weights to vLLM."""
    monkeypatch.setattr(engines, "runs_in_transformers", lambda job, name: False)
    monkeypatch.setattr(engines, "described", lambda job: describe(MODEL, family="llama", has_value_head=False))
    monkeypatch.setattr(engines.PushedEngine, "_weights", lambda pushed, model: [(model, torch.zeros(1))])
    return lambda device="cuda:0", **changes: engines.PushedEngine(job_of(device, **changes))


def test_weights_are_pushed_when_they_are_new_or_gone(push):
    pushed = push()
    # Nothing outlives the update: the engine needs weights even where the actor's are the same.
    pushed.wake("a", is_current=True)
    pushed.sleep()
    pushed.wake("b", is_current=False)
    loads = [each for each in pushed.engine._llm.log if each[0] in ("sleep", "reload_weights")]
    assert loads == [("sleep", 2), ("reload_weights", "a"), ("sleep", 2), ("reload_weights", "b")]


def test_weights_that_outlive_an_update_are_pushed_once(push):
    pushed = push(reshard_every=2)
    pushed.wake("a", is_current=False)
    pushed.sleep()
    pushed.wake("a", is_current=True)
    loads = [each for each in pushed.engine._llm.log if each[0] in ("sleep", "reload_weights")]
    assert loads == [("sleep", 1), ("reload_weights", "a"), ("sleep", 1)]


@pytest.mark.parametrize(("temperature", "mode"), [(1.0, "raw_logprobs"), (0.5, "processed_logprobs")])
def test_log_probs_are_those_that_are_exact(push, temperature, mode):
    assert push(temperature=temperature).engine._llm.options["logprobs_mode"] == mode


def test_a_cpu_has_a_cache_for_the_samples_together_within_the_budget(push, monkeypatch):
    asked = []
    monkeypatch.setattr(engines, "cache_bytes", lambda *given: asked.append(given) or 1 << 40)
    # A block of 128 tokens for each of two samples of up to 8, and vLLM's own; keys and values of 8 numbers in fp32.
    whole = 3 * 128 * 2 * 8 * 4
    assert push("cpu").engine._llm.options["kv_cache_memory_bytes"] == whole
    assert asked == [(0.5, torch.device("cpu"), 2)], "of two ranks none has a node's eighth"
    monkeypatch.setattr(engines, "cache_bytes", lambda *given: whole - 1)
    assert push("cpu").engine._llm.options["kv_cache_memory_bytes"] == whole - 1
    assert push("cuda:0").engine._llm.options["kv_cache_memory_bytes"] is None

"""Which engine a recipe may choose, and what weighs its samples."""

import re
from dataclasses import replace

import pytest

from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.recipe.check_sampling import check_stop
from hybridflow.recipe.load import load_recipe
from hybridflow.sections import to_dict
from tests.support.hf_models import write_tokenizer
from tests.support.recipes import SMALLEST

URL = "rollout.engine.urls=['http://localhost:8000']"
SERVER = ["rollout.engine.kind=openai", URL, "rollout.engine.off_policy=true"]


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALLEST)
    alone = ["algorithm=grpo", "critic=null", "cluster.ranks=1", "actor.update={}", "actor.rollout={}"]
    return lambda *overrides: load_recipe(path, [*alone, *overrides])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "none"),
        (["correction.kind=truncate"], "truncate"),
        (["rollout.engine.kind=vllm"], "truncate"),
        (["rollout.engine.kind=vllm", "correction.kind=icepop"], "icepop"),
        ([*SERVER, "correction.kind=none"], "none"),
        (["rollout.engine.kind=tgi", URL, "trainer.steps=0"], "truncate"),
        (["rollout.engine.kind=vllm", "rollout.temperature=0.7"], "truncate"),
        (["rollout.engine.kind=vllm", "rollout.top_k=5"], "truncate"),
        ([*SERVER, "rollout.engine.log_probs=processed", "rollout.temperature=0.7"], "truncate"),
    ],
)
def test_what_is_corrected(load, overrides, expected):
    assert load(*overrides).correction_kind == expected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.engine.kind=openai", "trainer.steps=0"], "rollout.engine.urls: missing"),
        (["rollout.engine.kind=openai", URL], "do not follow"),
        ([URL], "rollout.engine.urls: kind=megatron asks no server"),
        (["rollout.engine.kind=vllm", "rollout.engine.auth_env=X"], "auth_env: kind=vllm asks no server"),
        ([*SERVER, "rollout.temperature=0.5"], "log_probs=raw"),
        ([*SERVER, "rollout.engine.log_probs=processed", "rollout.top_p=0.5"], "log_probs=processed"),
        (["rollout.engine.kind=tgi", URL, "rollout.engine.off_policy=true", "rollout.top_k=5"], "TGI always"),
        (["rollout.engine.kind=vllm", "rollout.top_k=5", "rollout.temperature=0.5"], "between"),
        (["rollout.engine.kind=vllm", "rollout.min_p=0.1", "rollout.temperature=0.5"], "with rollout.min_p: vLLM"),
        (["rollout.engine.kind=vllm", "rollout.presence_penalty=1", "rollout.temperature=0.5"], "presence_penalty: v"),
        ([*SERVER, "rollout.engine.log_probs=processed", "rollout.repetition_penalty=1.1"], "log_probs=processed"),
        (
            ["rollout.engine.kind=vllm", "cluster.ranks=2", "actor.update={tp: 2}", "actor.rollout={tp: 2}"],
            "set tp, pp",
        ),
        (["rollout.engine.kind=vllm", "cluster.ranks=2", "actor.ranks=[0]", "reference.ranks=[1]"], "all ranks"),
        ([*SERVER, "rollout.engine.urls=['ftp://x']"], "expected http://host:port"),
        ([*SERVER, "rollout.engine.urls=['http://x:99999']"], "no address"),
        ([*SERVER, "rollout.engine.urls=['http://x/?key=1']"], "expected http://host:port"),
        ([*SERVER, "rollout.engine.auth_env='a b'"], "auth_env"),
        (
            ["rollout.engine.kind=vllm", "rollout.temperature=0.005"],
            "temperature=0.005: .*takes 0.01 to 10000",
        ),
        ([*SERVER, "rollout.presence_penalty=3"], "presence_penalty=3: rollout.engine.kind=openai takes -2 to 2"),
        (["correction.kind=icepop", "correction.low=3"], "correction.low=3 is not below"),
    ],
)
def test_what_does_not_fit_is_refused(load, overrides, words):
    with pytest.raises(ConfigError, match=words):
        load(*overrides)


WORKS_ON_TOKENS = [
    (["rollout.engine.kind=vllm"], "megatron", "rollout.engine.kind=vllm works on tokens"),
    ([], "transformers", "an actor that runs in transformers works on tokens"),
    ([], "megatron", None),
    (SERVER, "megatron", None),
]


@pytest.mark.parametrize(("overrides", "implementation", "words"), WORKS_ON_TOKENS)
def test_what_works_on_tokens_ends_at_special_ones_alone(load, tmp_path, overrides, implementation, words):
    write_tokenizer(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    recipe = load(*overrides, "rollout.stop=['=', '<|start|>']")
    recipe = replace(recipe, model=replace(recipe.model, implementation=implementation))
    for known, texts in ((tokenizer, "['=']"), (None, "['=', '<|start|>']")):
        if words is None:
            check_stop(recipe, known)
        else:
            with pytest.raises(ConfigError, match=re.escape(f"rollout.stop={texts}: {words}")):
                check_stop(recipe, known)
    check_stop(replace(recipe, rollout=replace(recipe.rollout, stop=("<|start|>", "<|pad|>"))), tokenizer)


def test_a_secret_in_an_address_is_refused_and_not_repeated(load):
    with pytest.raises(ConfigError, match="auth_env") as raised:
        load(*SERVER, "rollout.engine.urls=['http://me:hunter2@x:80']")
    assert "hunter2" not in str(raised.value)


def test_the_token_is_not_part_of_the_recipe(load, monkeypatch):
    monkeypatch.setenv("ENGINE_TOKEN", "hunter2")
    assert "hunter2" not in str(to_dict(load(*SERVER, "rollout.engine.auth_env=ENGINE_TOKEN")))

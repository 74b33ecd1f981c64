"""Checks of the rollout engine and the environment. No torch."""

from __future__ import annotations

from hybridflow.config.recipe import Recipe
from hybridflow.config.rewards import check_urls
from hybridflow.config.rollout import RolloutConfig
from hybridflow.data.tokenizer import Tokenizer, split_stop
from hybridflow.errors import ConfigError
from hybridflow.rollout.request import VLLM_RANGES
from hybridflow.sections import changed_keys


def check_environment(recipe: Recipe) -> None:
    """Refuse settings that do not go with an environment. Raises ConfigError."""
    made = recipe.data.arithmetic
    if made is not None and made.operation != "add" and made.mistake_share > 0:
        raise ConfigError(
            f"data.arithmetic.mistake_share={made.mistake_share}: only additions have a wrong carry; set it to 0, or "
            "data.arithmetic.operation to add"
        )
    if recipe.rollout.environment is not None and recipe.rollout.engine.kind != "megatron":
        raise ConfigError(
            f"rollout.engine.kind={recipe.rollout.engine.kind}: rollout.environment needs our own engine; "
            "set it to megatron, or remove the environment"
        )
    check_failure_reward(recipe, None if recipe.reward.kind is None else f"reward.{recipe.reward.kind}")


def check_failure_reward(recipe: Recipe, scorer: str | None) -> None:
    """Refuse a reward of the environment's failures where other rewards score. Raises ConfigError.

    Args:
        recipe: What is run.
        scorer: What scores in the environment's place; None: nothing.
    """
    environment = recipe.rollout.environment
    if scorer is not None and environment is not None and changed_keys(environment, ("failure_reward",)):
        raise ConfigError(
            f"rollout.environment.failure_reward={environment.failure_reward:g}: {scorer} scores, and the "
            "environment's rewards are not read; remove one of the two"
        )


def check_engine(recipe: Recipe) -> None:
    """Refuse settings that the rollout engine does not support. Raises ConfigError."""
    engine, layout = recipe.rollout.engine, recipe.actor.rollout or recipe.actor.update.for_rollout()
    if engine.kind != "megatron" and (layout.tp, layout.pp, layout.ep, layout.cp) != (1, 1, 1, 1):
        raise ConfigError(
            f"actor.rollout: rollout.engine.kind={engine.kind} takes no part of a model, found {layout}; set tp, pp, "
            "ep and cp to 1, and dp to the number of the actor's ranks"
        )
    if engine.kind == "vllm" and recipe.actor.ranks not in (None, tuple(range(recipe.cluster.ranks))):
        raise ConfigError(
            f"actor.ranks={list(recipe.actor.ranks or ())}: with rollout.engine.kind=vllm all ranks of the job must be "
            "the actor's, in their order, since vLLM starts on all of them together; leave the key out"
        )
    if engine.kind in ("vllm", "openai"):
        _check_range(recipe.rollout)
    if engine.kind != "megatron" and recipe.trainer.steps > 0:
        _check_known_log_probs(recipe.rollout)
    if not engine.is_server:
        for key in changed_keys(engine, ("urls", "model", "auth_env", "log_probs", "off_policy")):
            raise ConfigError(
                f"rollout.engine.{key}: kind={engine.kind} asks no server; remove it, or set kind to openai or tgi"
            )
        return
    if not engine.urls:
        raise ConfigError(f"rollout.engine.urls: missing; kind={engine.kind} needs at least one, as http://host:port")
    check_urls(engine.urls, "rollout.engine.urls")
    if not engine.off_policy and (recipe.trainer.steps > 0 or recipe.warm_start is not None):
        raise ConfigError(
            f"rollout.engine.kind={engine.kind}: the server's weights do not follow those that are trained; set "
            "trainer.steps=0 without warm_start to validate alone, choose kind=vllm, or set "
            "rollout.engine.off_policy=true to train on its samples all the same"
        )


def check_stop(recipe: Recipe, tokenizer: Tokenizer | None) -> None:
    """Refuse texts that end a response where it is sampled by what works on tokens. Special tokens end it everywhere.

    Args:
        recipe: What is run.
        tokenizer: Its tokenizer; None: it is yet to be trained.

    Raises:
        ConfigError: A text names no special token.
    """
    texts = list(split_stop(recipe.rollout.stop, tokenizer)[0])
    if not texts:
        return
    if recipe.rollout.engine.kind == "vllm":
        raise ConfigError(
            f"rollout.stop={texts}: rollout.engine.kind=vllm works on tokens, and ends at special ones alone; remove "
            "the texts, or set kind to megatron"
        )
    if recipe.model.implementation == "transformers":
        raise ConfigError(
            f"rollout.stop={texts}: an actor that runs in transformers works on tokens, and ends at special ones "
            "alone; remove the texts, or choose a model of docs/families.md"
        )


_CUTS = (
    *("top_k", "top_p", "min_p", "min_new_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""What makes the distribution sampled from another than the tempered one; their defaults do not."""


def _check_range(rollout: RolloutConfig) -> None:
    """Refuse numbers that vLLM would change, and those that each request would be refused for."""
    for name, (low, high) in VLLM_RANGES.items():
        if not low <= getattr(rollout, name) <= high:
            raise ConfigError(
                f"rollout.{name}={getattr(rollout, name):g}: rollout.engine.kind={rollout.engine.kind} takes {low:g} "
                f"to {high:g}; set such a number, or kind to megatron"
            )


def _check_known_log_probs(rollout: RolloutConfig) -> None:
    """Check that the engine reports what the trainer computes: log-probabilities at the temperature, before cuts."""
    kind, cuts = rollout.engine.kind, changed_keys(rollout, _CUTS)
    is_cut, named = len(cuts) > 0, ", ".join(f"rollout.{name}" for name in cuts)
    is_processed = kind == "tgi" or rollout.engine.log_probs == "processed" or (kind == "vllm" and not is_cut)
    if is_processed and is_cut:
        raise ConfigError(
            f"{named}: rollout.engine.log_probs=processed (TGI always) tells no log-probabilities but those after it, "
            "which the trainer does not compute; remove it"
        )
    if not is_processed and rollout.temperature != 1:
        if kind == "vllm":
            raise ConfigError(
                f"rollout.temperature={rollout.temperature:g} with {named}: vLLM tells log-probabilities before both "
                "or after both, and the trainer computes those between; set the temperature to 1, or drop the other"
            )
        raise ConfigError(
            f"rollout.temperature={rollout.temperature:g}: rollout.engine.log_probs=raw tells those at temperature 1; "
            "set it to 1, or start vLLM with --logprobs-mode processed_logprobs and set log_probs=processed"
        )

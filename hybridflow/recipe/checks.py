"""Checks across the sections of a recipe. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hybridflow.config.data import check_data
from hybridflow.config.losses import AdvantageConfig, KLConfig, ShapingConfig, check_correction
from hybridflow.config.metrics import check_prometheus
from hybridflow.config.recipe import CRITICS, MODEL_SECTIONS, REWARDS, Recipe
from hybridflow.config.rewards import check_reward
from hybridflow.config.roles import ActorConfig, CriticConfig
from hybridflow.config.rollout import RolloutConfig
from hybridflow.errors import ConfigError
from hybridflow.families.model import FREE_SETTINGS, check_model, differing
from hybridflow.families.model_info import ModelInfo
from hybridflow.flows.registry import ALGORITHMS, CHOSEN
from hybridflow.recipe.check_fp8 import check_fp8
from hybridflow.recipe.check_images import check_images
from hybridflow.recipe.check_placement import (
    check_lora,
    check_moe,
    check_partial_rollouts,
    check_placement,
    check_recompute,
    check_replay,
    check_reshard_every,
    check_split,
    check_uncut,
)
from hybridflow.recipe.check_sampling import check_engine, check_environment
from hybridflow.recipe.check_transformers import check_transformers
from hybridflow.sections import changed_keys


def check_settings(recipe: Recipe, found: Mapping[str, ModelInfo]) -> None:
    """Refuse model keys that contradict the weights they are read with. Raises ConfigError."""
    for key, settings in found.items():
        model = recipe.model_of(key.removesuffix(".model"))
        if (settings.model.implementation, model.implementation) == ("transformers", "megatron"):
            raise ConfigError(
                f"{key}.implementation=megatron: the family {settings.family!r} of {key}.path={model.path!r} has no "
                "table in docs/families.md, or config.json asks for more than the table has; leave the key out"
            )
        if settings.is_coded and model.implementation == "transformers":
            raise ConfigError(
                f"{key}.implementation=transformers: {key}.path={model.path!r} holds quantized weights, which "
                "transformers does not train; leave the key out, or convert the directory first: hybridflow convert "
                "SOURCE OUT --to hf"
            )
        whence = "the model that was given" if settings.assets is None else f"{key}.path={model.path!r}"
        for name in differing(model, settings.model):
            raise ConfigError(
                f"{key}.{name}={getattr(model, name)!r}: {whence} has {getattr(settings.model, name)!r}, and its "
                f"weights mean nothing else; leave the key out (only {', '.join(FREE_SETTINGS[1:])} may differ)"
            )
    if "model" in found and found["model"].has_value_head and not recipe.traits.is_scorer:
        raise ConfigError(
            f"model.path={recipe.model.path!r}: is a scorer, which gives no text; choose a causal language model (a "
            "scorer is for critic.model.path or reward.model.path)"
        )
    if "teacher.model" in found and found["teacher.model"].has_value_head:
        raise ConfigError(
            f"teacher.model.path={recipe.model_of('teacher').path!r}: is a scorer, which gives no text; choose a "
            "causal language model"
        )
    for role in REWARDS:
        if f"{role}.model" in found and not found[f"{role}.model"].has_value_head:
            raise ConfigError(
                f"{role}.model.path={recipe.model_of(role).path!r}: is a language model, which gives no score; choose "
                "a *ForSequenceClassification with one label"
            )


def check_recipe(recipe: Recipe, in_memory: Mapping[str, ModelInfo] | None = None) -> None:
    """Refuse keys that are right one by one and wrong together; ``in_memory`` is as for ``recipe_from_dict``.

    Raises:
        ConfigError: Two keys contradict each other.
        LayoutError: A layout does not fit its ranks or its model.
    """
    in_memory = {} if in_memory is None else in_memory
    _check_algorithm(recipe)
    check_reward(recipe.reward, "reward", is_in_memory="reward.model" in in_memory)
    if recipe.cost is not None:
        check_reward(recipe.cost, "cost", is_in_memory="cost.model" in in_memory)
        if recipe.cost.kind is None:
            raise ConfigError("cost.function: missing; name what tells the cost of a response, or give cost.model.path")
    for role, key in MODEL_SECTIONS.items():
        model = recipe.model_of(role)
        if model.implementation == "megatron":
            check_model(model, key)
        if model.dtype == "fp16":
            raise ConfigError(f"{key}.dtype=fp16: is for generating alone, since gradients underflow; set bf16 or fp32")
    _check_contexts(recipe)
    check_uncut(recipe, in_memory)
    check_recompute(recipe, in_memory)
    check_transformers(recipe, in_memory)
    check_data(recipe.data)
    check_images(recipe)
    _check_live(recipe)
    check_placement(recipe)
    check_split(recipe)
    check_partial_rollouts(recipe)
    check_reshard_every(recipe)
    check_replay(recipe)
    check_lora(recipe)
    check_moe(recipe)
    check_fp8(recipe, in_memory)
    _check_batches(recipe)
    check_environment(recipe)
    check_engine(recipe)
    _check_loss(recipe)
    _check_shaping(recipe)
    check_correction(recipe.correction)
    unused = {"none": ("level", "low", "high"), "truncate": ("low",)}.get(recipe.correction_kind, ())
    for key in changed_keys(recipe.correction, unused):
        raise ConfigError(
            f"correction.{key}: correction.kind is {recipe.correction_kind} here, and does not read it; leave it "
            "out, or set the kind"
        )
    _check_schedules(recipe)
    _check_validation(recipe)
    _check_offline(recipe)
    if not recipe.generates:
        _check_silent(recipe)
    _check_profile(recipe)
    prometheus = recipe.metrics.prometheus
    if prometheus is not None:
        check_prometheus(prometheus.pushgateway_url, prometheus.textfile, "metrics.prometheus")


def _check_algorithm(recipe: Recipe) -> None:
    traits, name = recipe.traits, recipe.algorithm
    for key in traits.needs:
        if getattr(recipe, key) is None:
            raise ConfigError(f"{key}: missing; algorithm={name} needs this section, docs/algorithms.md shows one")
    for key in changed_keys(recipe, sorted(CHOSEN - traits.reads)):
        users = ", ".join(other for other in ALGORITHMS if key in ALGORITHMS[other].traits.reads)
        raise ConfigError(
            f"{key}: algorithm={name} would ignore this section; remove it, or choose one that reads it: {users}"
        )
    _check_kl(recipe.kl)
    if traits.group_size > 1 and recipe.rollout.group_size == 1:
        raise ConfigError(
            f"rollout.group_size=1: algorithm={name} compares the responses to a prompt; set it to 2 or more, 8 say"
        )


def _check_kl(kl: KLConfig) -> None:
    if kl.coef > 0 and kl.place == "loss" and kl.estimator == "k1":
        raise ConfigError(
            "kl.estimator=k1: in the loss its gradient is 0 on average, so it holds nothing back; set it to k1+, k2 or "
            "k3, or kl.place to reward"
        )
    if kl.coef > 0 and kl.place == "reward" and kl.estimator.endswith("+"):
        raise ConfigError(
            f"kl.estimator={kl.estimator}: a penalty in the reward has no gradient; set it to "
            f"{kl.estimator.removesuffix('+')}, or kl.place to loss"
        )
    if kl.target is not None and kl.coef == 0:
        raise ConfigError("kl.target: adaptive KL multiplies kl.coef, which is 0; set it above 0, say to 0.1")
    if kl.target is None and kl.horizon != KLConfig().horizon:
        raise ConfigError(f"kl.horizon={kl.horizon}: kl.coef is fixed; set kl.target, or leave the key out")


def _check_live(recipe: Recipe) -> None:
    data = recipe.data
    name, source = ("spool", data.spool) if data.spool is not None else ("kafka", data.kafka)
    if source is None:
        return
    if source.deadline_s >= recipe.cluster.deadline_s:
        raise ConfigError(
            f"data.{name}.deadline_s={source.deadline_s:g}: ranks wait for each other for cluster.deadline_s="
            f"{recipe.cluster.deadline_s:g} and would give up first; lower the first or raise the second"
        )
    if recipe.tokenizer.path is None and recipe.model.path is None:
        raise ConfigError(f"tokenizer.path: missing; data.{name} has no text yet to train a tokenizer on")
    if data.file_format not in (None, "jsonl"):
        raise ConfigError(f"data.file_format={data.file_format}: data.{name} takes JSONL; remove the key")


def _check_contexts(recipe: Recipe) -> None:
    for role in MODEL_SECTIONS:
        context = recipe.model_of(role).max_context
        if context < recipe.model.max_context:
            raise ConfigError(
                f"{role}.model.max_context={context} is shorter than model.max_context={recipe.model.max_context}; "
                "raise the first, or lower the second"
            )


def _check_batches(recipe: Recipe) -> None:
    batch, mini, group = recipe.trainer.global_batch_size, recipe.trainer.mini_batch_size, recipe.rollout.group_size
    if batch % group:
        raise ConfigError(
            f"trainer.global_batch_size={batch} is not a multiple of rollout.group_size={group}; "
            f"set it to {math.ceil(batch / group) * group}"
        )
    if mini is not None and batch % mini:
        raise ConfigError(
            f"trainer.mini_batch_size={mini} does not divide trainer.global_batch_size={batch}; choose a divisor"
        )
    if recipe.rollout.min_new_tokens > recipe.rollout.max_new_tokens:
        raise ConfigError(
            f"rollout.min_new_tokens={recipe.rollout.min_new_tokens} is above "
            f"rollout.max_new_tokens={recipe.rollout.max_new_tokens}; lower the first or raise the second"
        )
    if recipe.rollout.max_new_tokens >= recipe.model.max_context:
        raise ConfigError(
            f"rollout.max_new_tokens={recipe.rollout.max_new_tokens} leaves no token for the prompt within "
            f"model.max_context={recipe.model.max_context}; lower the first or raise the second"
        )


def _check_loss(recipe: Recipe) -> None:
    loss = recipe.loss
    if loss.kind != "clip" and loss.dual_clip is not None:
        raise ConfigError(f"loss.dual_clip={loss.dual_clip:g}: loss.kind={loss.kind} has none; leave the key out")
    if loss.kind == "gspo" and loss.aggregation != "seq-mean-token-mean":
        raise ConfigError(
            f"loss.aggregation={loss.aggregation}: loss.kind=gspo weighs each sequence the same; set it to "
            "seq-mean-token-mean"
        )
    if loss.norm_tokens is not None and loss.aggregation != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"loss.norm_tokens={loss.norm_tokens}: loss.aggregation={loss.aggregation} does not divide by it; leave it "
            "out, or set the aggregation to seq-mean-token-sum-norm"
        )
    if recipe.algorithm == "reinforce++" and recipe.advantage.gae_lambda != AdvantageConfig().gae_lambda:
        raise ConfigError(
            f"advantage.gae_lambda={recipe.advantage.gae_lambda:g}: algorithm=reinforce++ has no critic to be weighed "
            "against; leave it out, advantage.gamma alone counts"
        )


def _check_shaping(recipe: Recipe) -> None:
    shaping, longest = recipe.shaping, recipe.rollout.max_new_tokens
    if shaping.overlong_buffer > longest:
        raise ConfigError(
            f"shaping.overlong_buffer={shaping.overlong_buffer} is above rollout.max_new_tokens={longest}: it is part "
            "of it; lower the first or raise the second"
        )
    if not shaping.overlong_buffer and shaping.overlong_factor != ShapingConfig().overlong_factor:
        raise ConfigError(
            f"shaping.overlong_factor={shaping.overlong_factor:g}: nothing is paid for without a buffer; set "
            "shaping.overlong_buffer, or leave it out"
        )


def _check_schedules(recipe: Recipe) -> None:
    steps = recipe.trainer.steps
    for key in ("actor", *CRITICS):
        section: ActorConfig | CriticConfig | None = getattr(recipe, key)
        if section is None:
            continue
        settings = section.optimizer
        if settings.min_lr > settings.lr:
            raise ConfigError(
                f"{key}.optimizer.min_lr={settings.min_lr:g} is above {key}.optimizer.lr={settings.lr:g}, from which "
                "the rate falls to it; lower it"
            )
        if settings.schedule == "constant" and settings.min_lr > 0:
            raise ConfigError(
                f"{key}.optimizer.min_lr={settings.min_lr:g}: {key}.optimizer.schedule=constant never comes down to "
                "it; set the schedule to linear or cosine, or remove the key"
            )
        if isinstance(section, CriticConfig) and section.warmup_steps > steps > 0:
            raise ConfigError(
                f"{key}.warmup_steps={section.warmup_steps} is more than trainer.steps={steps}: the actor would "
                "never learn; lower the first or raise the second"
            )


VALIDATION_KEYS = ("validate_every", "num_validation", "validation_samples", "pass_k", "keep_best", "patience")


def _check_validation(recipe: Recipe) -> None:
    trainer = recipe.trainer
    for name in changed_keys(trainer, VALIDATION_KEYS) if recipe.data.held_out is None else ():
        raise ConfigError(
            f"trainer.{name}={str(getattr(trainer, name)).lower()}: data.held_out is missing, so there is no "
            "validation; name a file of held-out rows there, or remove the key"
        )
    if trainer.validation_samples > 0 and not recipe.generates:
        scorer = "name what scores responses, such as reward.function=maths, or " if recipe.traits.imitates else ""
        raise ConfigError(
            f"trainer.validation_samples={trainer.validation_samples}: algorithm={recipe.algorithm} generates no "
            f"responses; {scorer}remove it"
        )
    if trainer.pass_k is not None and trainer.pass_k > trainer.validation_samples:
        raise ConfigError(
            f"trainer.pass_k={trainer.pass_k} is more than trainer.validation_samples={trainer.validation_samples}, "
            "the samples that it is estimated from; lower the first or raise the second"
        )
    for name in ("keep_best", "patience"):
        if getattr(trainer, name) and trainer.validate_every == 0:
            raise ConfigError(
                f"trainer.{name}={str(getattr(trainer, name)).lower()}: trainer.validate_every=0 compares no steps; "
                "set it to 10, say"
            )


def _check_offline(recipe: Recipe) -> None:
    """Refuse keys that an offline algorithm does not read, which has keys of its own."""
    traits, name = recipe.traits, recipe.algorithm
    rollout, made = recipe.rollout, recipe.data.arithmetic
    if traits.imitates and rollout.group_size > 1:
        raise ConfigError(f"rollout.group_size={rollout.group_size}: a row has one solution to imitate; remove the key")
    for key in changed_keys(recipe.preference):
        if key not in traits.preference_keys:
            users = ", ".join(other for other in ALGORITHMS if key in ALGORITHMS[other].traits.preference_keys)
            raise ConfigError(f"preference.{key}: algorithm={name} would ignore it; remove it, or choose {users}")
    if not traits.has_preferences:
        for key in changed_keys(recipe.data, _PREFERENCE_FIELDS):
            raise ConfigError(f"data.{key}: algorithm={name} reads no preferences; remove the key")
        return
    if made is not None and made.operation != "add":
        raise ConfigError(
            f"data.arithmetic.operation={made.operation}: the rejected response is a wrong carry, which only additions "
            "have; set it to add"
        )
    _check_mini_batches_of_preferences(recipe)
    if traits.is_scorer and recipe.warm_start is not None:
        raise ConfigError(f"warm_start: algorithm={name} trains a scorer, which writes no text; remove the section")


_PREFERENCE_FIELDS = ("chosen_field", "rejected_field", "margin_field", "wanted_field")


def _check_mini_batches_of_preferences(recipe: Recipe) -> None:
    batch = recipe.trainer.global_batch_size
    mini = recipe.trainer.samples_per_update
    for key, size in {"global_batch_size": batch, "mini_batch_size": mini}.items():
        if recipe.traits.is_paired and size % 2:
            raise ConfigError(
                f"trainer.{key}={size}: counts responses, of which a pair has two that belong together; set it to an "
                f"even number, {size + 1} say"
            )
    if not recipe.traits.is_paired and mini < 2:
        raise ConfigError(
            "trainer.mini_batch_size=1: algorithm=kto measures the KL with each prompt and another's completion; set "
            "it to 2 or more"
        )


def _check_silent(recipe: Recipe) -> None:
    """Refuse sampling keys where nothing is sampled."""
    name, trainer = recipe.algorithm, recipe.trainer
    given: dict[str, tuple[Any, Any]] = {
        f"rollout.{each.name}": (getattr(recipe.rollout, each.name), each.default)
        for each in fields(RolloutConfig)
        # Texts that end a response end one that is learned, too.
        if each.name not in ("max_new_tokens", "stop")
    }
    if not recipe.traits.imitates:
        # One recipe of sft may be run with a reward, and without.
        given["rollout.max_new_tokens"] = recipe.rollout.max_new_tokens, 1
        given["rollout.stop"] = recipe.rollout.stop, ()
    given["actor.rollout"] = recipe.actor.rollout, None
    given["actor.rollout_ranks"] = recipe.actor.rollout_ranks, None
    given["actor.offload"] = recipe.actor.offload is True, False
    given["trainer.max_staleness"] = trainer.max_staleness, 0
    remedy = "remove the key"
    if recipe.traits.imitates:
        remedy += ", or name data.held_out and what scores responses to it, such as reward.function=maths"
    for key, (found, default) in given.items():
        if found != default:
            shown = key if is_dataclass(found) and key.startswith("rollout.") else f"{key}={found}"
            raise ConfigError(f"{shown}: algorithm={name} samples nothing; {remedy}")


def _check_profile(recipe: Recipe) -> None:
    strangers = [rank for rank in recipe.profile.ranks if rank >= recipe.cluster.ranks]
    if strangers:
        raise ConfigError(
            f"profile.ranks={list(recipe.profile.ranks)}: {strangers} not among ranks 0 to {recipe.cluster.ranks - 1}; "
            "name ranks that exist (a fallback may set profile.ranks too)"
        )

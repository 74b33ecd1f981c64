"""A policy that a program calls: it generates in one layout, learns in another, and says what a switch costs."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybridflow.api.checkpoints import check_free, export_actor
from hybridflow.api.feed import Feed, check_same_rows
from hybridflow.api.generation import generation_of
from hybridflow.api.responses import requests_to, respond
from hybridflow.api.roles import Actor, split_model
from hybridflow.api.session import check_same_settings
from hybridflow.api.settings import finish_recipe, merge, put_under, recipe_values, sizes_of
from hybridflow.api.token_rows import IGNORED, TokenRows, labelled, token_rows
from hybridflow.api.trainers import OnlineTrainer
from hybridflow.api.world import find_world
from hybridflow.checkpoint.formats.in_memory import in_memory_info
from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.config.recipe import Recipe
from hybridflow.data.tokenizer import Tokenizer, tokenizer_in
from hybridflow.errors import ConfigError, DataError
from hybridflow.families.assets import ends_in
from hybridflow.layout import mesh as geometry
from hybridflow.mapping.memory import with_micro_batches
from hybridflow.mapping.memory_check import check_budget
from hybridflow.parallel.megatron import rank_sets
from hybridflow.placement.job import Job
from hybridflow.placement.library_models import with_library_models
from hybridflow.placement.peft import load_adapters
from hybridflow.placement.pretrained import assets_of
from hybridflow.placement.user_objects import check_objects, runs_in_transformers, user_class_of
from hybridflow.recipe.inputs import open_known
from hybridflow.roles.stepped_actor import SteppedActor
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.texts import with_stop_tokens
from hybridflow.sections import to_dict
from hybridflow.trainer.checkpoints import Checkpoints, ResumePoint
from hybridflow.trainer.plan import plan_job


@dataclass(frozen=True, kw_only=True)
class SwitchCost:
    """What it costs to go from learning to generating and back, as it was measured the last time.

    Attributes:
        ms: Milliseconds until generating can begin: weights are regrouped, and what the engine derives from them is
            made; on the slowest rank.
        back_ms: Milliseconds back; on the slowest rank.
        mb: Weights that came from other ranks, in 10^6 bytes, on the rank that received most; 0 where the layouts are
            the same.
        limit_mb: The least that could come, likewise.
        extra_mb: Memory beside the weights that learn, in 10^6 bytes, on the rank that needs most.
    """

    ms: float
    back_ms: float
    mb: float
    limit_mb: float
    extra_mb: float


class HybridOutput:
    """What ``HybridActor`` says of rows.

    Attributes:
        loss: Mean of the cross-entropy over the labels that count, a scalar fp32, equal on all ranks; None without
            labels. While the actor learns, ``backward()`` leaves gradients for ``HybridActor.step``.
        log_probs: Log-probability of each label at its own place, ``[rows, tokens]`` fp32 in host memory, equal on all
            ranks; 0 where none counts. None without labels.
        logits: See there; None where this rank has none.
    """

    def __init__(self, loss: Tensor | None, log_probs: Tensor | None, logits: Tensor | None) -> None:
        self.loss = loss
        self.log_probs = log_probs
        self._logits = logits

    @property
    def logits(self) -> Tensor:
        """Return ``[rows, tokens, vocab]``, 0 at padding, where one rank has the whole model and all rows.

        Raises:
            ConfigError: They lie cut on several ranks, which are never brought together.
        """
        if self._logits is None:
            raise ConfigError(
                "logits: lie cut on several ranks and are never brought together; give labels and take log_probs, or "
                "run the model on one rank"
            )
        return self._logits


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One optimizer step.

    Attributes:
        loss: Loss of the rows, before the step.
        grad_norm: Norm of the gradient, before it is clipped.
    """

    loss: float
    grad_norm: float


class HybridActor:
    """A policy on all ranks of the program, with a layout to learn in and one to generate in.

    Rows are given to all ranks alike and dealt to the replicas. Collective, but for properties: all ranks make each
    call, with the same arguments.

    Args:
        model: Directory, or model, as ``Actor`` takes it.
        hybrid_config: ``tp_size``, ``pp_size``, ``dp_size``, ``cp_size``, ``ep_size``, ``etp_size``, ``vpp_size`` (what
            is left out is 1, ``dp_size`` what fills the ranks) and ``sequence_parallel``; the same with ``rollout_``
            before them for generating (left out: as for learning); and short names and sections as ``PPOTrainer`` takes
            them: ``lr``, ``max_context``, ``dtype``, ``seed``, ``recompute``, ``lora_rank``, ``offload_to_cpu``, ….
        tokenizer: Path; None: the one that lies beside the model, if any. Only stop texts need it.

    Raises:
        HybridflowError: Whatever is wrong, with a message for the user.
    """

    def __init__(
        self, model: Any, hybrid_config: Mapping[str, Any] | None = None, *, tokenizer: str | Path | None = None
    ) -> None:
        section, objects = split_model(model, "actor")
        self._given = model, tokenizer
        self._has_learned = False
        self._world = find_world()
        self.recipe = _recipe(section, hybrid_config, objects, self._world.size)
        check_same_settings(self.recipe, False, self._world.everyone())
        torch.set_num_threads(self.recipe.cluster.threads_per_rank)
        plan = plan_job(self.recipe)
        self.recipe = with_micro_batches(self.recipe, plan.meshes, self._world.gpu_bytes())
        check_budget(self.recipe, plan.meshes)
        self._world.make_groups([*rank_sets(plan.meshes.values(), self._world.size), *plan.rank_sets()])
        place = tokenizer_in(section["path"]) if tokenizer is None and "path" in section else tokenizer
        known = None if place is None else open_known(place, self.recipe)
        if known is None and self.recipe.model.vocab_size is None:
            raise ConfigError(
                "tokenizer: missing; a model without a path has the tokenizer's vocabulary: name its path"
            )
        self._job = Job(
            world=self._world,
            recipe=self.recipe,
            meshes=plan.meshes,
            tokenizer=known,  # type: ignore[arg-type]  # only stop texts need one, which the engine then refuses
            train=Feed(known, self.recipe.model.max_context),  # type: ignore[arg-type]
            objects=objects,
        )
        self._job = with_library_models(self._job)
        check_objects(self._job)
        self._everyone = self._world.everyone()
        self._role = SteppedActor(self._job)
        assert self._role.model is not None and self._role.trainable is not None, "all ranks are in its mesh"
        self._role.model.load_given()
        load_adapters(self._job, self._role.model)
        self._role.trainable.reload_weights()
        self._role.mark_changed()
        # What is not shared is made when it is needed.
        self._role.enter_phase("update")
        self._phase = "update"
        self._ends = ends_in(assets_of(self._job, "actor")[1])
        if not self._ends.eos_ids and self._job.tokenizer is not None:
            self._ends = self._ends._replace(eos_ids=self._job.tokenizer.stop_ids)
        self._next_prompt_index = 0
        self._cost: dict[str, float] = {}

    @classmethod
    def from_pretrained(
        cls,
        path: Any,
        hybrid_config: Mapping[str, Any] | None = None,
        *,
        tokenizer: str | Path | None = None,
    ) -> HybridActor:
        """Load the model of the directory ``path``; see the class."""
        return cls(path, hybrid_config, tokenizer=tokenizer)

    def set_device_mesh(self, tp: int = 1, pp: int = 1) -> NoReturn:
        """Refuse ``tp`` and ``pp``: the layout of a loaded model does not change. Raises ConfigError."""
        raise ConfigError(
            "set_device_mesh: the layout is chosen when the model is read: HybridActor.from_pretrained(path, "
            f"hybrid_config={{'tp_size': {tp}, 'pp_size': {pp}}})"
        )

    @property
    def training(self) -> bool:
        """Return whether it is in the training phase, not the generating one."""
        return self._phase == "update"

    def train(self, mode: bool = True) -> HybridActor:
        """Switch to training: free the rollout layout's weights and everything that generating derived from them.

        Args:
            mode: False: as ``eval``.
        """
        return self._switch("update" if mode else "rollout")

    def eval(self) -> HybridActor:
        """Switch to generating: regroup weights into the rollout layout, and offload optimizer state if asked."""
        return self._switch("rollout")

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, or None if there is none."""
        return self._job.tokenizer

    def sampler(self) -> tuple[Any, geometry.DeviceMesh]:
        """Switch to generating, and return the engine (``rollout.request.Engine``) and the mesh of its replicas."""
        self.eval()
        assert self._role.rollouts is not None, "all ranks generate"
        return self._role.rollouts.engine, self._job.meshes["actor.rollout"]

    def update_weights(self, trainer: OnlineTrainer) -> None:
        """Take the weights of a trainer's actor, that has the same shape, without a file. Calls ``train``.

        Args:
            trainer: The trainer, before it is closed.

        Raises:
            ConfigError: Its actor has adapters, or another shape.
        """
        self.train()
        assert self._role.model is not None and self._role.trainable is not None, "all ranks are in its mesh"
        # A class of the user's own is the very object that was trained.
        if user_class_of(self._job, "actor") is None:
            trainer.copy_actor(self._role.model)
        self._role.trainable.reload_weights()
        self._role.mark_changed()
        self._has_learned = True

    def as_actor(self) -> Actor:
        """Return the policy that it is, with its layouts and adapters, for a trainer; see ``update_weights``.

        Raises:
            ConfigError: It has learned, and a trainer would begin with the model that it was made of.
        """
        model, tokenizer = self._given
        if self._has_learned or self._role.num_updates > 0:
            raise ConfigError(
                "HybridActor: has learned, and a trainer would begin with the model that it was made of; call "
                "save_pretrained(path), and give the trainer the path"
            )
        actor = self.recipe.actor
        layouts = {"update": actor.update, "rollout": actor.rollout}
        given = {name: to_dict(layout) for name, layout in layouts.items() if layout is not None}
        return Actor(model, tokenizer, lora=actor.lora, **given)

    def generate(self, input_ids: Any, attention_mask: Any = None, **generation: Any) -> Tensor:
        """Return responses to prompts, as ``generate`` of transformers does. Calls ``eval`` first.

        Sampling uses the whole distribution unless the arguments cut it; transformers would keep the 50 likeliest
        tokens.

        Args:
            input_ids: ``[prompts, tokens]``.
            attention_mask: 0 where there is padding, on the left or on the right; None: nothing is.
            generation: ``max_new_tokens`` or ``max_length``, ``do_sample`` (else the likeliest token is taken),
                ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``num_return_sequences``,
                ``min_new_tokens``, ``eos_token_id``, ``pad_token_id``, ``stop_strings``, ``bad_words_ids``, ``seed``.

        Returns:
            ``[prompts * num_return_sequences, tokens]`` int64, on the device of ``input_ids``: the prompts as they were
            given, with what was generated behind them, filled up with ``pad_token_id``. Equal on all ranks.

        Raises:
            DataError: A prompt leaves no room for a response, or an argument is unknown.
        """
        rows = self._rows(input_ids, attention_mask)
        asked = generation_of(generation, self._ends, longest_prompt=rows.padded.shape[1])
        most, context, count = asked.params.max_new_tokens, self.recipe.model.max_context, asked.num_samples
        for index, sequence in enumerate(rows.sequences):
            if len(sequence) > context - most:
                raise DataError(
                    f"input_ids[{index}]: {len(sequence)} tokens and max_new_tokens={most} exceed max_context="
                    f"{context}; shorten it, or ask for fewer"
                )
        # A seed gives the same responses each time, and its absence others.
        first_prompt_index = self._next_prompt_index if asked.params.seed is None else 0
        self._next_prompt_index += len(rows.sequences)
        params = with_stop_tokens(asked.params, self._job.tokenizer)
        requests = requests_to(rows.sequences, params, first_prompt_index=first_prompt_index, num_samples=count)
        engine, mesh = self.sampler()
        try:
            found = respond(engine, requests, mesh, self._world, group_size=count)
        except DataError as error:
            raise DataError(f"generate: {error}") from error
        problem = next((each.error or "failed" for each in found if each.finish == "failed"), None)
        if problem is not None:
            raise DataError(f"generate: {problem}")
        tokens = pad_sequence([each.tokens for each in found], batch_first=True, padding_value=asked.pad_id)
        whole = torch.cat([rows.padded.repeat_interleave(count, 0), tokens], dim=1)
        return whole.to(input_ids.device) if isinstance(input_ids, Tensor) else whole

    def __call__(
        self, input_ids: Any, labels: Any = None, attention_mask: Any = None, *, token_type_ids: Any = None
    ) -> HybridOutput:
        """Return the output of the trained weights for rows, in either phase.

        Args:
            input_ids: ``[rows, tokens]``.
            labels: ``[rows, tokens]``: what is to be predicted at each place by the tokens before it, -100 for nothing;
                mostly ``input_ids``. At padding nothing is. None: there is no loss.
            attention_mask: As of ``generate``.
            token_type_ids: Say nothing here; some tokenizers give them.

        Raises:
            DataError: Rows and labels do not belong together, or no label counts.
        """
        rows = self._rows(input_ids, attention_mask)
        table = torch.full_like(rows.padded, IGNORED) if labels is None else labels
        given = labelled(rows, table, vocab_size=self._job.vocab_size, is_needed=labels is not None)
        if labels is None and not self._role.is_whole:
            raise DataError("labels: missing; without them there are logits alone, which lie cut on several ranks")
        refusal = self._backward_refusal()
        found = self._role.predict(given, has_gradient=refusal is None and torch.is_grad_enabled())
        logits = None if found.logits is None else rows.side_by_side(found.logits)
        if labels is None:
            return HybridOutput(None, None, logits)
        loss = found.loss
        if refusal is not None:
            loss = _Refusing.apply(loss.detach().requires_grad_(), refusal)  # type: ignore[no-untyped-call]
        # The first token of a row is predicted by none.
        shifted = torch.nn.functional.pad(found.log_probs, (1, 0))
        log_probs = [row[: len(each)] for row, each in zip(shifted, rows.sequences, strict=True)]
        return HybridOutput(loss, rows.side_by_side(log_probs), logits)

    def training_step(
        self, input_ids: Any, labels: Any, attention_mask: Any = None, *, lr: float | None = None
    ) -> TrainingStep:
        """Take one optimizer step on the loss of rows, through all pipeline stages.

        Calls ``train`` first. The rows are cut into micro-batches.

        Args:
            input_ids: As of a call.
            labels: As of a call.
            attention_mask: As of ``generate``.
            lr: Learning rate from now on; None: as it is.

        Raises:
            DataError: As of a call.
        """
        rows = self._rows(input_ids, attention_mask)
        given = labelled(rows, labels, vocab_size=self._job.vocab_size)
        self.train()
        loss, grad_norm = self._role.learn(given, lr)
        return TrainingStep(loss=loss, grad_norm=grad_norm)

    def step(self, lr: float | None = None) -> float:
        """Take one optimizer step on the gradients that ``loss.backward()`` has left since the last one.

        Args:
            lr: Learning rate from now on; None: as it is.

        Returns:
            The norm of the gradient, before it is clipped.

        Raises:
            ConfigError: It does not learn at present, or its loss has no ``backward()``.
        """
        refusal = self._backward_refusal()
        if refusal is not None:
            raise ConfigError(refusal)
        return self._role.step(lr)

    def switch_cost(self) -> SwitchCost:
        """Return the cost of the last switch to generating and back; without one, switch now."""
        before = self._phase
        if not {"rollout_ms", "update_ms"} <= self._cost.keys():
            for phase in ("update", "rollout", "update"):
                self._switch(phase)
        self._switch(before)
        return SwitchCost(
            ms=self._cost["rollout_ms"],
            back_ms=self._cost["update_ms"],
            **{
                name: self._cost.get(f"reshard/{metric}", 0.0) / 1e6
                for name, metric in (("mb", "bytes"), ("limit_mb", "limit_bytes"), ("extra_mb", "extra_bytes"))
            },
        )

    def save_pretrained(self, path: str | Path) -> None:
        """Write the weights that learn as a directory of transformers, adapters merged, with the tokenizer if any.

        Raises:
            ConfigError: The model is a class of the user's own.
            CheckpointError: ``path`` is there.
            WriteError: The file system refuses.
        """
        path = Path(path)
        if user_class_of(self._job, "actor") is not None and not runs_in_transformers(self._job, "actor"):
            raise ConfigError(f"{path}: transformers does not read a class of your own; save its state_dict() yourself")
        check_free(path, self._world)
        token = self._everyone.decide("a name", secrets.token_hex(8))
        aside = path.with_name(f"{path.name}.{token}.tmp")
        job = replace(self._job, recipe=replace(self.recipe, run_dir=str(aside)))
        # Without the optimizer, which transformers does not read.
        role = SimpleNamespace(spec=self._role.spec, model=self._role.model)
        try:
            checkpoints = Checkpoints(job, {"actor": role}, ResumePoint(None, token, ""))
            checkpoints.save(self._role.num_updates, {}, None)
            checkpoints.finish()
            self._everyone.barrier("the weights")
            export_actor(aside, path, self._world)
        finally:
            if self._everyone.is_lead:
                shutil.rmtree(aside, ignore_errors=True)

    def _rows(self, input_ids: Any, attention_mask: Any) -> TokenRows:
        context = self.recipe.model.max_context
        rows = token_rows(input_ids, attention_mask, vocab_size=self._job.vocab_size, most_tokens=context)
        check_same_rows([each.tolist() for each in rows.sequences], "input_ids", self._everyone)
        return rows

    def _switch(self, phase: str) -> HybridActor:
        """Switch to another phase and measure the cost, unless it is the current one."""
        if phase == self._phase:
            return self
        self._role.metrics.clear()
        self._synchronize()
        begin_s = time.perf_counter()
        self._role.enter_phase(phase)
        rollouts = self._role.rollouts
        if phase == "rollout" and rollouts is not None and isinstance(rollouts.engine, MegatronEngine):
            rollouts.engine.prepare()
        self._synchronize()
        found = {f"{phase}_ms": (time.perf_counter() - begin_s) * 1000, **self._role.metrics}
        for share in self._everyone.gather(found, "the cost of a switch"):
            found = {name: max(value, share.get(name, value)) for name, value in found.items()}
        self._cost |= found
        self._phase = phase
        return self

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def _backward_refusal(self) -> str | None:
        """Return why a loss cannot be differentiated, or None if it can."""
        if not self._role.can_differentiate:
            return (
                f"loss.backward(): of a model in layout {self.recipe.actor.update} backward passes go through all "
                "pipeline stages at once, and those of a class of your own are taken by us; call "
                "actor.training_step(input_ids=…, labels=…)"
            )
        if not self.training:
            return "loss.backward(): the actor generates at present; call actor.train() before"
        return None


class _Refusing(torch.autograd.Function):
    """A loss whose ``backward()`` says what to call instead."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, refusal: str) -> Tensor:
        ctx.refusal = refusal
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise ConfigError(ctx.refusal)


def _recipe(
    section: Mapping[str, Any], hybrid_config: Mapping[str, Any] | None, objects: Mapping[str, Any], num_ranks: int
) -> Recipe:
    """Return the recipe of supervised training that has such an actor."""
    config = dict(hybrid_config or {})
    engine = {key: config.pop(key) for key in list(config) if key.startswith("rollout_")}
    sizes = sizes_of(config)
    if "fsdp_sharding" in config:
        # FSDP cuts no matrix: the sizes are those of the rollout.
        engine = {**{f"rollout_{key}": size for key, size in sizes.items()}, **engine}
        sizes = {}
    sections = {"model": section, "actor": sizes, "hybrid_engine": engine}
    values = recipe_values(merge([sections, config]), algorithm="sft", num_ranks=num_ranks)
    # The program's own loss may be any: the rate of supervised training is not meant for all of them.
    put_under(values, "actor.optimizer.lr", AlgorithmTraits.lr)
    # How long responses may be, and how they are sampled, is told with each call.
    values.setdefault("rollout", {})["max_new_tokens"] = 1
    # Supervised training samples only what something scores.
    put_under(values, "reward.function", "exact_match")
    values.setdefault("trainer", {})["global_batch_size"] = num_ranks
    recipe = finish_recipe(values, in_memory=in_memory_info(objects))
    if recipe.rollout.temperature != 1:
        raise ConfigError(
            "hybrid_config: temperature is told with each call: generate(…, do_sample=True, temperature=…)"
        )
    return recipe

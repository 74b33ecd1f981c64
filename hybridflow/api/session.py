"""A job in this process, which is one of its ranks, for a program that takes its steps one by one."""

from __future__ import annotations

import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridflow.api.feed import Feed, GivenProblems, check_same, prompts_of
from hybridflow.api.settings import finish_recipe
from hybridflow.api.world import find_world
from hybridflow.checkpoint.formats.in_memory import in_memory_info
from hybridflow.config.recipe import Recipe
from hybridflow.data.preferences import pairs_of
from hybridflow.data.problems import training_shape
from hybridflow.data.prompts import Example
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.graph import Step
from hybridflow.dataflow.run import Scope
from hybridflow.errors import ConfigError, DataError
from hybridflow.exit_status import REQUEUE
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.parallel.signals import leave, listen
from hybridflow.parallel.world import World
from hybridflow.placement.job import Job, Problems
from hybridflow.placement.pretrained import align_ends
from hybridflow.recipe.check_sampling import check_stop
from hybridflow.recipe.inputs import check_vocabularies, open_known, tokenizer_path
from hybridflow.sections import changed_keys, flat, text_keys, to_dict
from hybridflow.trainer.plan import JobPlan
from hybridflow.trainer.trainer import make_trainer

MakeProblems = Callable[[Tokenizer, Recipe, Coordinator, bool], Problems]
"""From tokenizer, recipe, ranks, and whether each problem needs an answer, to what is learned from. On all ranks."""

_TOKENIZER = "tokenizer"

MOST_PROMPTS = 64
"""Prompts of a step, where the program says nothing of it."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Samples with their scores: this rank's share.

    Attributes:
        about: Number of the step, and which prompts it samples.
        scope: What this rank holds, by place.
        tokenizer: For ``texts``.
        source: Token of the job that sampled it.
    """

    about: Mapping[str, Any]
    scope: Scope
    tokenizer: Tokenizer
    source: object = field(repr=False)

    @property
    def batch(self) -> Batch:
        """Return the local samples with all columns: ``tokens``, ``prompt_lengths``, ``response_mask``, ``scores``, ….

        A rank that has none returns no samples.
        """
        held = [each for each in self.scope.values() if "tokens" in each.columns]
        return max(held, key=lambda each: len(each.columns), default=Batch.empty())

    @property
    def texts(self) -> list[str]:
        """Return the local responses as text."""
        batch = self.batch
        if not len(batch):
            return []
        rows = zip(batch.ragged("tokens").to_list(), batch.dense("prompt_lengths").tolist(), strict=True)
        return [self.tokenizer.decode(row[length:].tolist()) for row, length in rows]

    @property
    def scores(self) -> Tensor | None:
        """Return the scores of the local samples, ``[samples]``, or None without samples."""
        column = self.batch.columns.get("scores")
        return column if isinstance(column, Tensor) else None

    def __len__(self) -> int:
        return len(self.batch)


class Session:
    """A job whose steps a program takes. A context manager, which ends it. Collective: all ranks.

    Args:
        values: A recipe's nested mapping, from ``settings.recipe_values``.
        tokenizer: Path, or a fast tokenizer of transformers; None: the one that lies beside the model.
        objects: Role -> model or function, as ``placement.job.Job`` takes them.
        step: Stages of a training step, in the place of the algorithm's.
        make_problems: Where prompts come from; None: they are given to ``rollout``.
        make_held_out: Where the rows of ``validate`` come from; None: there is no validation.
        num_prompts: Prompts of a step, where ``values`` has no size of its batch.
        steps_of: From the number of problems to the steps of the job; None: ``values`` has them, or it has no end.
        reads_data: Whether ``make_problems`` reads the recipe's section ``data``.
        resume: Whether to go on from the last checkpoint of ``run_dir``, if there is one.

    Attributes:
        recipe: Recipe of the job.
        trainer: The job.

    Raises:
        HybridflowError: Whatever is wrong, with a message for the user.
    """

    def __init__(
        self,
        values: dict[str, Any],
        *,
        tokenizer: Any = None,
        objects: Mapping[str, Any] | None = None,
        step: Step | None = None,
        make_problems: MakeProblems | None = None,
        make_held_out: MakeProblems | None = None,
        num_prompts: int | None = None,
        steps_of: Callable[[int], int] | None = None,
        reads_data: bool = False,
        resume: bool = False,
    ) -> None:
        self._world = find_world()
        self._token = object()
        self._objects = {} if objects is None else dict(objects)
        self._make_problems, self._make_held_out = make_problems, make_held_out
        self._num_prompts = num_prompts
        self._scores = step is None or any(each.role == "reward" for each in step.flow.nodes())
        if "run_dir" not in values:
            values["run_dir"] = _new_run_dir(self._world, values.get("namespace"))
        if tokenizer is not None:
            values.setdefault("tokenizer", {})["path"] = _tokenizer_place(tokenizer, values["run_dir"], self._world)
        if steps_of is not None:
            # Until the problems are counted, which needs a recipe.
            values["trainer"]["steps"] = 1
        self.recipe = finish_recipe(values, num_prompts=num_prompts, in_memory=in_memory_info(self._objects))
        check_same_settings(self.recipe, resume, self._world.everyone())
        if not reads_data:
            _check_no_data(self.recipe)
        self._source: tuple[Tokenizer, Problems] | None = None
        if steps_of is not None:
            rows = self._find_source()[1].num_rows
            assert rows is not None, "rows that are there can be counted"
            self.recipe = replace(self.recipe, trainer=replace(self.recipe.trainer, steps=steps_of(rows)))
        self.trainer = make_trainer(self.recipe, self._world, resume=resume, step=step, open_job=self._open)
        self.trainer.begin()
        if self._world.watch is None:
            listen(self.trainer.ask_stop)
        self._next_prompt_index = self.trainer.progress.next_prompt_index
        self._has_warned = False

    @property
    def step(self) -> int:
        """Return the number of training steps done."""
        return self.trainer.progress.step

    def rollout(self, batch: Any = None) -> Rollout:
        """Sample and score. Collective: all ranks, with the same batch.

        If a signal or the time limit asks the job to stop, the job is saved, and the program ends with status 75.

        Args:
            batch: Prompts, as ``feed.prompts_of`` takes them; None: the next ones of the session's own source.

        Raises:
            DataError: The batch has another number of prompts than a step of this recipe, or others on another rank.
        """
        problems, wanted = self.trainer.job.train, self.trainer.progress.num_prompts
        if batch is not None:
            if not isinstance(problems, Feed):
                raise DataError("rollout: the prompts come from data_provider; call rollout() without a batch")
            given = prompts_of(batch)
            if len(given) != wanted:
                raise DataError(
                    f"rollout: {len(given)} prompts; this job takes {wanted} in each step (rollout_batch_size="
                    f"{self.recipe.trainer.global_batch_size} over {self.recipe.samples_per_prompt} samples of each): "
                    "give so many, or set rollout_batch_size"
                )
            check_same(given, self._world.everyone())
            problems.add(given, self._next_prompt_index)
        elif isinstance(problems, Feed):
            raise DataError("rollout: no prompts; give a batch, or make the trainer with a data_provider")
        about = {
            "step": self.trainer.progress.step + 1,
            "first_prompt_index": self._next_prompt_index,
            "num_prompts": wanted,
            "version": self.trainer.progress.step,
        }
        scope, groups = self.trainer.rollout(about), self.trainer.roles.groups
        self._next_prompt_index += wanted
        if groups is not None:
            # Groups that were not kept have taken more.
            self._next_prompt_index = max(self._next_prompt_index, groups.next_prompt_index)
        # A rollout that was told to stop has not all of its samples.
        if self.trainer.stop_if_asked() is not None:
            leave(self.trainer.ask_stop)
            # The program can be begun again and goes on, with resume=True: the status says so to who started it.
            raise SystemExit(REQUEUE)
        return Rollout(about=about, scope=scope, tokenizer=self.trainer.job.tokenizer, source=self._token)

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Update on a rollout, and return the step's metrics and ``loss``, the actor's. Collective: all ranks.

        ``rollout/staleness_max`` counts the updates since the rollout.

        Raises:
            DataError: Another job has sampled it.
        """
        if rollout.source is not self._token:
            raise DataError(
                "update: the rollout was sampled by another trainer; give what rollout() of this one returned"
            )
        behind = self.trainer.progress.step - rollout.about["version"]
        if behind > 0:
            self._tell_stale(behind)
        # Several rollouts may be made before the first update: the step is the one that learns.
        metrics = self.trainer.learn(rollout.scope, {**rollout.about, "step": self.trainer.progress.step + 1})
        self._next_prompt_index = max(self._next_prompt_index, self.trainer.progress.next_prompt_index)
        # Of a step that trains the critic alone there is none.
        return {**metrics, "loss": metrics.get("actor/loss", 0.0)}

    def run(
        self, steps: int | None = None, *, epochs: int | None = None, eval_steps: int | None = None
    ) -> list[dict[str, float]]:
        """Train on the session's own prompts.

        Args:
            steps: How many more; None: until the prompts have been gone through ``epochs`` times. The last step is
                filled up with prompts of the next turn.
            epochs: In all, with those before a resume; None: once more than whole turns have been.
            eval_steps: Steps between validations. Where there are held-out rows, there is one at the end in any case.

        Returns:
            The metrics of each step, as of ``learn``; of one with a validation ``validation/*`` too.

        Raises:
            ConfigError: ``steps`` is None, and nobody knows how many prompts there are.
        """
        end = self._end_of(epochs) if steps is None else 0
        found: list[dict[str, float]] = []

        def is_done() -> bool:
            return self._next_prompt_index >= end if steps is None else len(found) >= steps

        while not is_done():
            found.append(self.learn(self.rollout()))
            is_due = eval_steps is not None and self.step % eval_steps == 0
            if self._make_held_out is not None and (is_due or is_done()):
                found[-1] |= self.validate()
        return found

    def _end_of(self, epochs: int | None) -> int:
        """Return the prompt index behind some epochs, as ``run`` counts them."""
        rows = self.trainer.job.train.num_rows
        if rows is None:
            raise ConfigError("train: no prompts; make the trainer with data_provider=…, or call step(batch)")
        return rows * (self._next_prompt_index // rows + 1 if epochs is None else epochs)

    def validate(self) -> dict[str, float]:
        """Measure ``validation/*`` with the weights of this step. Collective: all ranks."""
        return self.trainer.validate(again=True)

    def save(self) -> Path:
        """Save a checkpoint that ``resume`` goes on from. Collective: all ranks. Returns its run directory."""
        self.trainer.save_now()
        return Path(self.recipe.run_dir)

    def close(self) -> None:
        """End the job after saving its progress. Collective: all ranks."""
        leave(self.trainer.ask_stop)
        if self.step > 0:
            self.trainer.save_now()
        self.trainer.end()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        leave(self.trainer.ask_stop)
        # After a failure others may be gone.
        if kind is None:
            self.close()

    def _tell_stale(self, behind: int) -> None:
        actor = self.trainer.roles.actor
        actor.metrics["rollout/staleness_max"] = max(float(behind), actor.metrics.get("rollout/staleness_max", 0.0))
        if self.recipe.correction_kind == "none" and not self._has_warned and self._world.rank == 0:
            print(
                f"hybridflow: update {self.step + 1} is on a rollout that {behind} update(s) have come after, and "
                "nothing corrects for that; take a new rollout before each update, or set correction: {kind: truncate}",
                file=sys.stderr,
                flush=True,
            )
        self._has_warned = True

    def _needs_answer(self) -> bool:
        """Return whether what scores compares a response with its prompt's answer."""
        is_other = not self._scores or "reward" in self._objects or self.recipe.teacher is not None
        return not is_other and training_shape(self.recipe, None).needs_answer

    def _find_source(self) -> tuple[Tokenizer, Problems]:
        """Return the tokenizer and what is learned from, opened at the first call. Collective: all ranks."""
        if self._source is not None:
            return self._source
        recipe, make = self.recipe, self._make_problems
        path = tokenizer_path(recipe)
        if path is None:
            raise ConfigError("tokenizer: missing; give tokenizer=…, a path or a tokenizer of transformers")
        tokenizer = open_known(path, recipe)
        check_stop(recipe, tokenizer)
        check_vocabularies(recipe, tokenizer)
        if make is None:
            _check_batches(recipe)
            room = recipe.model.max_context - recipe.rollout.max_new_tokens
            problems: Problems = Feed(tokenizer, room, needs_answer=self._needs_answer())
        else:
            problems = make(tokenizer, recipe, self._world.everyone(), self._needs_answer())
        rows, wanted = problems.num_rows, self._num_prompts
        if rows is not None and wanted is not None and rows < wanted:
            raise ConfigError(
                f"rollout_batch_size: missing: a step takes {wanted} prompts then, and the data_provider has {rows} "
                f"rows; set it to {rows * recipe.samples_per_prompt} or less, {recipe.samples_per_prompt} for each row"
            )
        self._source = tokenizer, problems
        return self._source

    def _open(self, recipe: Recipe, world: World, plan: JobPlan) -> Job:
        tokenizer, problems = self._find_source()
        job = Job(
            world=world,
            recipe=recipe,
            meshes=plan.meshes,
            tokenizer=tokenizer,
            train=problems,
            objects=self._objects,
            **self._held_out(recipe, tokenizer),
        )
        align_ends(job)
        return job

    def _held_out(self, recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return what the job is judged by. Collective: all ranks."""
        if self._make_held_out is None:
            return {}
        problems = self._make_held_out(tokenizer, recipe, self._world.everyone(), self._needs_answer())
        rows = range(problems.num_rows or 0)
        if recipe.traits.imitates:
            return {"held_out_solutions": tuple(problems.solution(row) for row in rows)}
        if recipe.traits.has_preferences:
            return {"held_out_pairs": pairs_of([problems.responses(row) for row in rows], "eval_dataset")}
        return {"held_out": tuple((problems.example(row), problems.prompt(row)) for row in rows)}


def _check_batches(recipe: Recipe) -> None:
    """Refuse what needs to know the prompts to come, where a program gives each batch as it likes."""
    if recipe.traits.resamples is not None:
        raise ConfigError(
            f"algorithm={recipe.algorithm} samples more than once in a step; give a data_provider, from which it "
            "prompts, in the place of batches"
        )
    if recipe.rollout.partial_rollouts:
        raise ConfigError(
            "rollout.partial_rollouts: begins with prompts of the next step; give a data_provider in the place of "
            "batches, or remove it"
        )


def check_same_settings(recipe: Recipe, resume: bool, everyone: Coordinator) -> None:
    """Refuse settings that are not the same on all ranks: numbers, choices, algorithm, ``run_dir``. Collective.

    Other texts may differ, such as paths: nodes may have disks of their own.

    Raises:
        ConfigError: They are not; names the first that differs.
    """
    texts = text_keys(Recipe) - {"algorithm", "run_dir"}
    own = {key: value for key, value in flat({"resume": resume, **to_dict(recipe)}).items() if key not in texts}
    first = everyone.decide("the settings of the first rank", own)
    different = next((key for key in own if own[key] != first.get(key)), None)
    told = None if different is None else [different, own[different]]
    found = everyone.gather(told, "whether all ranks have the same settings")
    for rank, other in zip(everyone.ranks, found, strict=True):
        if other is not None:
            key, value = other
            raise ConfigError(
                f"{key}: {first.get(key)} on rank {everyone.ranks[0]}, {value} on rank {rank}; every rank passes the "
                "same settings: leave out what is of the rank, the time or chance"
            )


def _check_no_data(recipe: Recipe) -> None:
    """Refuse keys of ``data`` where nothing reads them."""
    for name in changed_keys(recipe.data):
        if name not in ("train", "held_out"):
            raise ConfigError(
                f"data.{name}: is not read for what a program gives; remove it, and give DataProvider(…, {name}=…) as "
                "the source, or rows as they are to be read"
            )


def prompts_per_step(values: Mapping[str, Any], prompts: Any) -> int | None:
    """Return the prompts of a step where a program gives prompts all at once: all of them, ``MOST_PROMPTS`` at most.

    Args:
        values: As of ``Session``.
        prompts: As of ``problems_of``; None: there are none.

    Returns:
        None: ``values`` has a size of the batch, or there are no prompts.
    """
    if prompts is None or values.get("trainer", {}).keys() & {"global_batch_size", "mini_batch_size"}:
        return None
    return MOST_PROMPTS if hasattr(prompts, "problems") else min(MOST_PROMPTS, len(prompts_of(prompts)))


def problems_of(prompts: Any, place: str = "prompts") -> MakeProblems:
    """Return the function that makes problems of prompts that a program passes all at once.

    Args:
        prompts: As ``feed.prompts_of`` takes them; or an object with ``problems``, such as a ``DataProvider``.
        place: Name of the prompts in messages.
    """
    if hasattr(prompts, "problems"):
        made: MakeProblems = prompts.problems
        return made
    given = prompts_of(prompts, place)

    def make(tokenizer: Tokenizer, recipe: Recipe, everyone: Coordinator, needs_answer: bool) -> Problems:
        check_same(given, everyone, place)
        room = recipe.model.max_context - recipe.rollout.max_new_tokens
        feed = Feed(tokenizer, room, needs_answer=needs_answer)
        prompt_indices = feed.add(given, 0)
        examples: tuple[Example, ...] = tuple(feed.example(prompt_index) for prompt_index in prompt_indices)
        return GivenProblems(
            examples=examples,
            seed=recipe.seed,
            prompts=tuple(feed.prompt(prompt_index) for prompt_index in prompt_indices),
        )

    return make


def _new_run_dir(world: World, namespace: str | None) -> str:
    """Return a directory that does not exist yet, the same on all ranks."""
    folder = Path("runs") / ("python" if namespace is None else namespace)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    return str(folder / world.everyone().decide("run_dir", name if world.rank == 0 else None))


def _tokenizer_place(tokenizer: Any, run_dir: str, world: World) -> str:
    """Return the path of a tokenizer.

    The lowest rank writes a tokenizer of transformers into the run's directory.
    """
    if isinstance(tokenizer, str | Path):
        return str(tokenizer)
    if isinstance(getattr(tokenizer, "path", None), Path):
        return str(tokenizer.path)
    if not hasattr(tokenizer, "save_pretrained") or not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"tokenizer: found {type(tokenizer).__name__}; give a path, or a fast tokenizer of transformers "
            "(AutoTokenizer.from_pretrained(…, use_fast=True))"
        )
    folder = Path(run_dir) / _TOKENIZER
    if world.rank == 0:
        aside = folder.with_name(f"{_TOKENIZER}.tmp")
        for left in (aside, folder):
            shutil.rmtree(left, ignore_errors=True)
        tokenizer.save_pretrained(aside)
        aside.rename(folder)
    world.everyone().barrier("the tokenizer")
    return str(folder)

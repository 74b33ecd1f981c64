"""Trainers that learn from given responses: preferences, verdicts, solutions. Nothing is sampled."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hybridflow.api.checkpoints import check_free, export_actor
from hybridflow.api.device_mesh import DeviceMesh, settings_of_mesh
from hybridflow.api.feed import GivenProblems, check_same_rows
from hybridflow.api.roles import Actor
from hybridflow.api.session import MakeProblems, Session
from hybridflow.api.settings import check_count, check_eval_steps, context_of, merge, put, put_under, recipe_values
from hybridflow.api.world import find_world
from hybridflow.checkpoint.formats.in_memory import in_memory_info
from hybridflow.checkpoint.formats.registry import open_model
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import LoRAConfig
from hybridflow.data.preferences import encode_responses
from hybridflow.data.problems import shape_of
from hybridflow.data.prompts import Example, encode_solution, prompt_tokens
from hybridflow.data.rows import with_roles
from hybridflow.data.shaping import Shaper, ends_of, examples_of
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, DataError, LayoutError
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.sections import read_section

Row = Mapping[str, Any]

_SAID_BY_TRAIN = (
    ("trainer", "steps", "give train(max_steps=…)"),
    ("trainer", "global_batch_size", "give train(per_device_train_batch_size=…, gradient_accumulation_steps=…)"),
    ("rollout", "max_new_tokens", "nothing is sampled: give max_length=… to the class, for prompt and response"),
)
"""Section, key, and what says it."""


_AS_ARGUMENTS = "settings are arguments here, such as lr=1e-6; batch size and epochs go to train(…)"
_ELSEWHERE = {
    "args": _AS_ARGUMENTS,
    "config": _AS_ARGUMENTS,
    "train_dataset": "give dataset=…",
    "eval_strategy": "give eval_dataset=…, and eval_steps=… to train(…)",
    "processing_class": "give tokenizer=…",
    "peft_config": "give lora=LoraConfig(…)",
    **dict.fromkeys(
        ("num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "eval_steps"),
        "give it to train(…)",
    ),
}
"""Arguments of other frameworks' trainers, and what says it here."""


class OfflineTrainer:
    """Learns from rows of text that are there. Collective: all ranks, with the same arguments.

    Args:
        model: As ``Actor`` takes it.
        tokenizer: Path, or fast tokenizer of transformers; None: the one that lies beside the model.
        dataset: A ``datasets.Dataset``, a list of rows, or a ``DataProvider``. Texts of rows may be messages.
        eval_dataset: Rows to measure ``validation/*`` on, in the forms of ``dataset``; None: there is no validation.
        max_length: Longest row in tokens, prompt and response together; no more than the model's own context.
        too_long: What becomes of a longer one: ``error``, or it is left out, ``drop``. Of a ``DataProvider`` its own
            ``on_bad_row`` decides.
        lora: Train adapters alone; what is written has them merged.
        ref_model: What the policy is measured against: a directory or a model in memory; None: it itself, as it begins.
        device_mesh: A ``DeviceMesh``, which says where the roles lie; None: on all ranks.
        settings: Short names and sections, as ``PPOTrainer`` takes them.

    Raises:
        ConfigError: A setting is unknown, or contradicts another.
    """

    algorithm = "dpo"

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        dataset: Any = None,
        *,
        eval_dataset: Any = None,
        max_length: int = 1024,
        too_long: Literal["error", "drop"] = "error",
        lora: LoRAConfig | None = None,
        ref_model: Any = None,
        device_mesh: DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        for name in settings:
            if name in _ELSEWHERE:
                raise ConfigError(f"{type(self).__name__}: {name}=…: unknown; {_ELSEWHERE[name]}")
        if dataset is None:
            raise ConfigError(
                f"{type(self).__name__}: no dataset; give dataset=…, rows with {' and '.join(self._columns())}"
            )
        if too_long not in ("error", "drop"):
            raise ConfigError(f"{type(self).__name__}: too_long={too_long!r}; give error or drop")
        for name, rows in (("dataset", dataset), ("eval_dataset", eval_dataset)):
            if rows is not None:
                _check_dataset(rows, f"{type(self).__name__}: {name}")
        check_count(max_length, f"{type(self).__name__}: max_length", more=", in tokens")
        self._actor = model if isinstance(model, Actor) else Actor(model, tokenizer, lora=lora)
        self._tokenizer = self._actor.tokenizer if tokenizer is None else tokenizer
        self._objects = dict(self._actor.objects)
        if ref_model is not None:
            is_folder = isinstance(ref_model, str | Path)
            self._objects["reference"] = open_model(Path(ref_model)) if is_folder else ref_model
        self._dataset, self._eval_dataset = dataset, eval_dataset
        self._max_length, self._drops = max_length, too_long == "drop"
        self._settings = merge([settings, settings_of_mesh(device_mesh)])
        # Recipe and steps of the last train().
        self._trained: tuple[dict[str, Any], int] | None = None
        # Refuses settings that are unknown, here and not in train().
        self._recipe_values({})

    def train(
        self,
        num_train_epochs: float = 1,
        per_device_train_batch_size: int = 2,
        learning_rate: float | None = None,
        output_dir: str | Path | None = None,
        *,
        gradient_accumulation_steps: int = 1,
        max_steps: int | None = None,
        eval_steps: int | None = None,
        resume: bool = False,
        **settings: Any,
    ) -> list[dict[str, float]]:
        """Train. Collective: all ranks.

        A second call continues from ``run_dir`` if ``resume`` is set, and fails otherwise.

        A step learns from ``per_device_train_batch_size`` x ``gradient_accumulation_steps`` rows on each replica of the
        model. ``micro_batch_tokens`` decides how they are cut into micro-batches. At the end ``run_dir`` has a
        checkpoint to resume from.

        Args:
            num_train_epochs: How often the rows are gone through, in an order that ``seed`` decides; the last step is
                filled up with rows of the next turn.
            per_device_train_batch_size: Rows; a pair is one, and two for ``KTOTrainer``.
            learning_rate: Constant, unless ``actor`` has an ``optimizer`` with another ``schedule``. None: that of the
                settings, or where they have none the algorithm's own (docs/recipes.md).
            output_dir: Where to write the model as transformers reads it; the files of the run, with a checkpoint to go
                on from, are beside it, in ``OUTPUT_DIR-run``, unless ``run_dir`` is given. None: it is not written.
            gradient_accumulation_steps: Multiplies the rows of a step.
            max_steps: Instead of ``num_train_epochs``.
            eval_steps: Steps between validations on ``eval_dataset``; there is one at the end in any case.
            resume: Go on from the last checkpoint of ``run_dir``, if there is one.
            settings: As of the class.

        Returns:
            The metrics of each step (docs/metrics.md), equal on all ranks, and ``loss``; of a step with a validation
            ``validation/*`` too.

        Raises:
            ConfigError: A number of rows, epochs or steps is none, or settings say another one; or it was called
                before, and would begin with the initial model again.
            DataError: A row lacks a field, or is too long; names it.
            CheckpointError: ``output_dir`` is there.
        """
        here = f"{type(self).__name__}.train"
        check_count(per_device_train_batch_size, f"{here}: per_device_train_batch_size")
        check_count(gradient_accumulation_steps, f"{here}: gradient_accumulation_steps")
        check_eval_steps(eval_steps, self._eval_dataset, here)
        if max_steps is not None:
            check_count(max_steps, f"{here}: max_steps")
        elif not isinstance(num_train_epochs, int | float) or not 0 < num_train_epochs < math.inf:
            raise ConfigError(f"{here}: num_train_epochs={num_train_epochs!r}, expected a number above 0")
        if output_dir is not None:
            check_free(Path(output_dir), find_world())
        rate = {} if learning_rate is None else {"lr": learning_rate}
        values = self._recipe_values(merge([settings, rate]))
        rows = per_device_train_batch_size * gradient_accumulation_steps * self._replicas(values)
        self._put_batch(values, rows)

        def steps_of(num_rows: int) -> int:
            return math.ceil(num_train_epochs * num_rows / rows) if max_steps is None else max_steps

        if output_dir is not None:
            values.setdefault("run_dir", f"{output_dir}-run")
        self._check_again(values.get("run_dir") if resume else None)
        with self._session(values, steps_of, resume=resume) as session:
            self._trained = values, session.recipe.trainer.steps
            metrics = session.run(max(0, session.recipe.trainer.steps - session.step), eval_steps=eval_steps)
            if output_dir is not None:
                export_actor(session.save(), Path(output_dir), find_world())
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Measure the policy on ``eval_dataset``: as it begins, or as the last ``train`` left it.

        Collective: all ranks.

        Returns:
            ``validation/*`` (docs/metrics.md), equal on all ranks.

        Raises:
            ConfigError: There is no ``eval_dataset``.
            DataError: As for ``train``.
        """
        if self._eval_dataset is None:
            raise ConfigError(
                f"{type(self).__name__}.evaluate: nothing to validate on; give the class an eval_dataset, too"
            )
        if self._trained is not None:
            values, steps = self._trained
        else:
            values, steps = self._recipe_values({}), 1
            # Training begins a run of its own there.
            values.pop("run_dir", None)
            self._put_batch(values, self._replicas(values))
        with self._session(copy.deepcopy(values), lambda _: steps, resume=self._trained is not None) as session:
            return session.validate()

    def _recipe_values(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return a recipe's nested mapping from the settings of the class and these."""
        given = merge([self._actor.settings, self._settings, settings])
        values = recipe_values(given, algorithm=self.algorithm, num_ranks=find_world().size)
        self._check_settings(values)
        return values

    def _put_batch(self, values: dict[str, Any], rows: int) -> None:
        """Set how many rows a step learns from, and how long they are."""
        own = context_of(values, in_memory_info(self._objects))
        put_under(values, "model.max_context", self._max_length if own is None else min(self._max_length, own))
        # Nothing is sampled, and the last token is room enough for it.
        put(values, "rollout.max_new_tokens", 1)
        per_row = 2 if ALGORITHMS[self.algorithm].traits.is_paired else 1
        put(values, "trainer.global_batch_size", rows * per_row)

    def _session(self, values: dict[str, Any], steps_of: Callable[[int], int], *, resume: bool) -> Session:
        return Session(
            values,
            tokenizer=self._tokenizer,
            objects=self._objects,
            make_problems=self._maker(self._dataset, "dataset"),
            make_held_out=None if self._eval_dataset is None else self._maker(self._eval_dataset, "eval_dataset"),
            steps_of=steps_of,
            reads_data=not hasattr(self._dataset, "problems"),
            resume=resume,
        )

    def _check_settings(self, values: Mapping[str, Any]) -> None:
        """Refuse settings of what the arguments of ``train`` say."""
        for section, key, remedy in _SAID_BY_TRAIN:
            given = values.get(section)
            if isinstance(given, Mapping) and key in given:
                raise ConfigError(f"{type(self).__name__}: {section}.{key}={given[key]!r} is not read here; {remedy}")

    def _check_again(self, resumed: Any) -> None:
        """Refuse a second training that would not go on with the first."""
        run_dir = None if self._trained is None else self._trained[0]["run_dir"]
        if run_dir is not None and (resumed is None or Path(resumed).resolve() != Path(run_dir).resolve()):
            raise ConfigError(
                f"{type(self).__name__}.train: was called before, and would begin with the initial model again; go on "
                f"with resume=True, run_dir={str(run_dir)!r} and more epochs or steps, or make another trainer"
            )

    @classmethod
    def _columns(cls) -> tuple[str, ...]:
        """Return the columns that a row must have."""
        return ("prompt", "chosen", "rejected")

    def _maker(self, dataset: Any, name: str) -> MakeProblems:
        """Return what opens rows, given as the argument of this name."""
        own: MakeProblems | None = getattr(dataset, "problems", None)
        return functools.partial(self._problems, dataset, name) if own is None else own

    def _problems(
        self,
        dataset: Iterable[Any],
        name: str,
        tokenizer: Tokenizer,
        recipe: Recipe,
        everyone: Coordinator,
        needs_answer: bool,
    ) -> GivenProblems:
        context, shape = recipe.model.max_context, shape_of(recipe, tokenizer)
        read: Callable[..., Any] = encode_responses if recipe.traits.has_preferences else encode_solution
        kept, found, num_dropped = [], [], 0
        for example in self._examples(dataset, name, tokenizer, recipe):
            try:
                found.append(read(example, tokenizer, max_context=context, ends=ends_of(example, shape, tokenizer)))
            except DataError as error:
                if not self._drops:
                    # Which is the less of the two.
                    raise DataError(
                        f"{error}: it is max_length={self._max_length}, or what the model has; too_long='drop' leaves "
                        "such rows out"
                    ) from None
                num_dropped += 1
                continue
            kept.append(example)
        check_same_rows(found, name, everyone)
        if not kept and not num_dropped:
            raise DataError(f"{name}: has no rows; give at least one")
        if not kept:
            raise DataError(f"{name}: none of {num_dropped} rows fits into max_length={context}; raise it")
        return GivenProblems(
            examples=tuple(kept),
            seed=recipe.seed,
            prompts=tuple(prompt_tokens(example, tokenizer) for example in kept),
            **({"all_responses": tuple(found)} if recipe.traits.has_preferences else {"solutions": tuple(found)}),
        )

    def _examples(self, dataset: Iterable[Any], name: str, tokenizer: Tokenizer, recipe: Recipe) -> Iterator[Example]:
        """Yield what the rows give, in the forms that files may have too (docs/data.md)."""
        # Lengths are looked at afterwards: a long row may be left out.
        shape = replace(shape_of(recipe, tokenizer), max_context=None)
        shaper = Shaper(shape)
        try:
            for index, row in enumerate(_rows(dataset, name)):
                place = f"{name}[{index}]"
                shaped = shaper(with_roles(row), place)
                if shaped is not None:
                    yield from examples_of(shaped.row, place, shaped.begins, shape)
        finally:
            shaper.close()

    def _replicas(self, values: Mapping[str, Any]) -> int:
        actor = values.get("actor")
        update = actor.get("update") if isinstance(actor, Mapping) else None
        num_ranks: int = values["cluster"]["ranks"]
        if update is None:
            return num_ranks
        try:
            return read_section(ParallelLayout, update, source="actor.update").dp
        except (ConfigError, LayoutError):
            # What is no layout is refused with the recipe, by its key.
            return num_ranks


class DPOTrainer(OfflineTrainer):
    """DPO (arXiv 2305.18290): rows with ``prompt``, ``chosen`` and ``rejected``; see ``OfflineTrainer``.

    Args:
        model: As there.
        tokenizer: As there.
        dataset: As there.
        beta: How dear it is to leave the reference.
        max_length: As there.
        label_smoothing: Share of pairs that are taken for the wrong way round.
        more: As there.
    """

    algorithm = "dpo"

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        dataset: Any = None,
        beta: float = 0.1,
        max_length: int = 1024,
        *,
        label_smoothing: float = 0.0,
        **more: Any,
    ) -> None:
        preference = {"beta": beta, "label_smoothing": label_smoothing}
        super().__init__(model, tokenizer, dataset, max_length=max_length, preference=preference, **more)


class KTOTrainer(OfflineTrainer):
    """KTO (arXiv 2402.01306): rows with ``prompt``, ``completion`` and ``label``, true or false.

    Args:
        model: As of ``OfflineTrainer``.
        tokenizer: As there.
        dataset: As there.
        beta: How dear it is to leave the reference.
        max_length: As there.
        desirable_weight: Weight of the loss of wanted completions.
        undesirable_weight: Weight of the loss of the others.
        more: As there.
    """

    algorithm = "kto"

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        dataset: Any = None,
        beta: float = 0.1,
        max_length: int = 1024,
        *,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        **more: Any,
    ) -> None:
        weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        super().__init__(model, tokenizer, dataset, max_length=max_length, preference={"beta": beta, **weights}, **more)

    @classmethod
    def _columns(cls) -> tuple[str, ...]:
        return ("prompt", "completion", "label")


class RewardTrainer(OfflineTrainer):
    """A scorer of pairs (Bradley-Terry): rows as of ``DPOTrainer``, and ``margin`` if there is one.

    The model gets one number for each row in the place of its vocabulary; what is written is a
    ``*ForSequenceClassification`` with one label, which ``RewardModel(path)`` scores with.
    """

    algorithm = "reward-model"


class SFTTrainer(OfflineTrainer):
    """Supervised training: rows with ``prompt`` and ``completion``, of which the completion is imitated."""

    algorithm = "sft"

    @classmethod
    def _columns(cls) -> tuple[str, ...]:
        return ("prompt", "completion")


def _check_dataset(dataset: Any, whose: str) -> None:
    """Refuse what is no rows that can be counted. Raises DataError: says how to make them."""
    remedy = None
    if isinstance(dataset, str | Path):
        remedy = f"give DataProvider({str(dataset)!r})"
    elif isinstance(dataset, Mapping) and all(hasattr(part, "column_names") for part in dataset.values()):
        remedy = f"give one of its splits: {', '.join(f'dataset[{name!r}]' for name in dataset)}"
    elif isinstance(dataset, Mapping):
        remedy = "of columns make rows by datasets.Dataset.from_dict(dataset)"
    elif hasattr(dataset, "to_records"):
        remedy = "give dataset.to_dict('records')"
    elif not hasattr(type(dataset), "num_rows") and not (hasattr(dataset, "__len__") and hasattr(dataset, "__iter__")):
        remedy = "give list(dataset), a datasets.Dataset, or a DataProvider"
    if remedy is not None:
        raise DataError(f"{whose}: found {type(dataset).__name__}, expected rows that can be counted; {remedy}")


def _rows(dataset: Iterable[Any], name: str) -> Iterable[Row]:
    for index, row in enumerate(dataset):
        if not isinstance(row, Mapping):
            raise DataError(f"{name}[{index}]: found {type(row).__name__}, expected a row with names of columns")
        yield row

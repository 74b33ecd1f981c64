"""Whether a run would find its inputs: its files are opened, its reward and environment are called on the first row.

No torch, unless there is an environment.

Nothing is written, and no start of the run is counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hybridflow.config.data import DataSourceConfig
from hybridflow.config.recipe import MODEL_SECTIONS, REWARDS, Recipe
from hybridflow.config.rewards import RewardConfig
from hybridflow.config.rollout import EnvironmentConfig
from hybridflow.data.arithmetic import check_files, make_problems
from hybridflow.data.chat import is_plain
from hybridflow.data.problems import held_out_shape, training_shape
from hybridflow.data.prompts import Example, as_text
from hybridflow.data.shaping import Shape, Shaper, examples_of, read_examples
from hybridflow.errors import DataError, RewardError
from hybridflow.families.assets import CONFIG
from hybridflow.families.weight_files import find_weight_files
from hybridflow.observe.exporters import find_callback
from hybridflow.recipe.check_sampling import check_stop
from hybridflow.recipe.inputs import check_vocabularies, open_known, tokenizer_path
from hybridflow.recipe.nested import inner
from hybridflow.rewards.kinds import make_kind
from hybridflow.rewards.sample import Sample
from hybridflow.rewards.scorer import Scorer
from hybridflow.rollout.calls import CallFailed, Calls
from hybridflow.rollout.engines.wire import token_of
from hybridflow.sections import to_dict


def try_inputs(recipe: Recipe, *, is_node: bool = True) -> list[str]:
    """Open the files of a recipe and read their first rows, import what it names; call rewards and environment on one.

    Modules are imported as a rank does; the caller has the working directory on the path. Topics, spools, services,
    judges and models are not asked.

    Args:
        recipe: From ``load_recipe``; its files are there.
        is_node: This machine is like those that the job runs on: what runs programs is tried too.

    Returns:
        What was found, in words.

    Raises:
        HybridflowError: The run would fail; says why.
    """
    found = []
    _try_weights(recipe)
    _try_replay(recipe)
    _try_names(recipe, is_node=is_node)
    path = tokenizer_path(recipe)
    tokenizer = None if path is None else open_known(path, recipe)
    check_stop(recipe, tokenizer)
    check_vocabularies(recipe, tokenizer)
    shape = training_shape(recipe, tokenizer)
    example = None
    for title, each in _first_examples(recipe, shape):
        example = each if example is None else example
        found.append(f"{title}: {each.place} can be read")
    # A template of the recipe's, or prompts that are messages, have rendered it.
    if example is not None and tokenizer is not None and is_plain(example.prompt, example.begins, tokenizer):
        found.append(
            "prompts are plain text, so the tokenizer's chat template is not applied; for a chat model set "
            "data.prompt_as_message=true"
        )
    if recipe.rollout.environment is not None and example is not None:
        found.append(_try_environment(recipe.rollout.environment, example))
    for role in REWARDS if example is not None else ():
        section: RewardConfig | None = getattr(recipe, role)
        if section is not None and example is not None and _is_tried(section, recipe, is_node=is_node):
            found.append(_try_reward(section, role, example))
    return found


def _try_weights(recipe: Recipe) -> None:
    """Look for the weights of Hugging Face directories. Raises CheckpointError: a file is missing."""
    values = to_dict(recipe)
    for section in MODEL_SECTIONS.values():
        path = inner(values, f"{section}.path")
        if path is not None and (Path(path) / CONFIG).is_file():
            find_weight_files(Path(path))


def _try_replay(recipe: Recipe) -> None:
    """Look for the samples of the first step where an archive has them. Raises DataError: one is not there."""
    rollout = recipe.rollout
    if rollout.replay is None:
        return
    # Brings numpy, which begins threads; ranks are forked from a process without.
    from hybridflow.rollout.archive import FOLDER, not_archived, read_places, replayed_segments

    num_prompts = recipe.trainer.global_batch_size // rollout.group_size
    missing = {(prompt_index, index) for prompt_index in range(num_prompts) for index in range(rollout.group_size)}
    for name in replayed_segments(Path(rollout.replay)):
        places = read_places(Path(rollout.replay) / FOLDER, name)
        missing -= set(zip(places["prompt_index"].tolist(), places["index"].tolist(), strict=True))
        if not missing:
            return
    raise not_archived(Path(rollout.replay), min(missing))


def _try_names(recipe: Recipe, *, is_node: bool) -> None:
    """Import the environment and the callbacks, and look for the tokens of servers where the job has this machine's."""
    if recipe.rollout.environment is not None:
        # Environments work with torch.
        from hybridflow.rollout.environment import find_environment

        find_environment(recipe.rollout.environment.name)
    for name in recipe.metrics.callbacks:
        find_callback(name)
    if not is_node:
        return
    values = to_dict(recipe)
    for key in (*(f"{role}.{kind}" for role in REWARDS for kind in ("service", "judge")), "rollout.engine"):
        token_of(inner(values, f"{key}.auth_env"), f"{key}.auth_env")


def _first_examples(recipe: Recipe, shape: Shape) -> Iterator[tuple[str, Example]]:
    """Yield the name and the first example of all data of a run that are files."""
    data, has_preferences = recipe.data, recipe.traits.has_preferences
    if data.arithmetic is not None:
        assert data.train is not None, "check_data refuses it"
        check_files(data.arithmetic, train=data.train, held_out=data.held_out, has_preferences=has_preferences)
        rows = make_problems(data.arithmetic, has_preferences=has_preferences)
        made = [("data.train", data.train, shape)]
        if data.held_out is not None:
            made.append(("data.held_out", data.held_out, held_out_shape(shape, recipe)))
        for (title, path, own), (row, *_) in zip(made, rows, strict=False):
            place = f"{path} as data.arithmetic makes it, row 0"
            with contextlib.closing(Shaper(own)) as shaper:
                shaped = shaper(dict(row), place)
            if shaped is not None:
                yield title, examples_of(shaped.row, place, shaped.begins, own)[0]
        return
    if data.spool is None and data.kafka is None:
        for source in data.sources:
            yield "data.train" if data.train is not None else "data.mixture", _first(source, shape)
    if data.held_out is not None:
        source = DataSourceConfig(path=data.held_out, file_format=data.file_format)
        yield "data.held_out", _first(source, held_out_shape(shape, recipe))


def _first(source: DataSourceConfig, shape: Shape) -> Example:
    examples = read_examples(source, shape)
    with contextlib.closing(examples):
        for example in examples:
            return example
    raise DataError(f"{source.path}: none of its rows can be used; see data.max_prompt_tokens and data.on_bad_row")


def _is_tried(section: RewardConfig, recipe: Recipe, *, is_node: bool) -> bool:
    is_used = "loss" in recipe.traits.reads or recipe.scores_held_out
    if not is_used or section.kind in ("model", "service", "judge"):
        return False
    if section.kind is None and recipe.rollout.environment is not None:
        return False
    return is_node or section.function != "code"


def _try_environment(settings: EnvironmentConfig, example: Example) -> str:
    """Begin a conversation with the answer as the first response. Raises RewardError: it cannot begin."""
    # Environments work with torch.
    from hybridflow.rollout.environment import ask, ask_first, failure_of, find_environment

    make, calls = find_environment(settings.name), Calls(settings.step_deadline_s)

    def outcome(call: Callable[[], Any]) -> Any:
        calls.submit(0, call)
        while not (ended := calls.ended(wait_s=1.0)):
            pass
        return ended[0][1]

    begun = outcome(lambda: ask_first(make, example))
    if isinstance(begun, CallFailed):
        raise RewardError(
            f"{failure_of(settings.name, make, example, None, str(begun))}; mend it, an environment is made without "
            "arguments and has reset(prompt, answer) and step(response)"
        )
    response = as_text(example.answer)
    answer = outcome(lambda: ask(begun[0], response))
    if isinstance(answer, CallFailed):
        return (
            f"{failure_of(settings.name, make, example, response, str(answer))}; the run would go on, unless the "
            "environment fails in all samples"
        )
    end = "ends" if answer[2] else "goes on"
    return (
        f"environment {settings.name!r}: {end} and gives {answer[1]:g} for the answer of {example.place} as a response"
    )


def _try_reward(settings: RewardConfig, role: str, example: Example) -> str:
    """Score the answer as if it were the response, and no text: many a reward fails on what is no answer.

    Raises:
        RewardError: One of both has no score, and needs one.
    """
    with contextlib.closing(Scorer(make_kind(settings, role), settings, role)) as scorer:
        sample = Sample(
            prompt=example.prompt, response="", answer=example.answer, place=example.place, fields=example.row
        )
        right = as_text(example.answer)
        (empty, *rest) = scorer.scores([sample, *([sample._replace(response=right)] if right else [])])
        if scorer.counts.failed:
            return (
                f"{scorer.counts.first_failure}; the run would go on, as {role}.on_failure={settings.on_failure} says"
            )
        given = f"gives {empty:g} for an empty response to {example.place}"
        if rest:
            return f"{role} {scorer.kind.name!r}: {given}, and {rest[0]:g} for its answer as a response"
        there = ", ".join(example.row)
        return f"{role} {scorer.kind.name!r}: {given}, which has no answer (fields: {there}; see data.answer_field)"

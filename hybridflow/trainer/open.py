"""From a recipe to a job: data and tokenizer made if absent, the data prepared, all checked before a model is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybridflow.checkpoint.job_file import latest_step, step_path
from hybridflow.config.data import DataSourceConfig
from hybridflow.config.recipe import Recipe
from hybridflow.data.arithmetic import ensure_files
from hybridflow.data.chat import is_plain
from hybridflow.data.images import HELD_OUT, IMAGES, Image, held_out_number, source_and_row
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.preferences import JudgedResponse, encode_responses, pairs_of
from hybridflow.data.problems import FOLDER, example_in, held_out_shape, open_problems, open_stores, training_shape
from hybridflow.data.prompts import Example, Solution, encode_solution, prompt_tokens
from hybridflow.data.queues import open_queue
from hybridflow.data.shaping import Shape, ends_of, read_examples
from hybridflow.data.tokenizer import Tokenizer, open_tokenizer
from hybridflow.errors import DataError
from hybridflow.families.assets import FOLDER as ASSETS
from hybridflow.families.images import reads_images
from hybridflow.parallel.world import World
from hybridflow.placement.job import Job
from hybridflow.recipe.check_sampling import check_stop
from hybridflow.recipe.inputs import check_vocabularies, open_known, tokenizer_path
from hybridflow.trainer.plan import JobPlan


def open_job(recipe: Recipe, world: World, plan: JobPlan) -> Job:
    """Prepare and open what the job needs. The lowest rank makes files that are absent, while the others wait.

    Collective: all ranks.

    Raises:
        DataError: A file is malformed, a prompt leaves no room for a response, models have different tokenizers, or the
            one that the run trained is gone.
        ConfigError: A model's vocabulary is smaller than the tokenizer's, the model has no tokenizer, or what samples
            does not end at a text of ``rollout.stop``.
        DeadlineError: A rank did not come.
    """
    data, has_preferences = recipe.data, recipe.traits.has_preferences
    path, trained = tokenizer_path(recipe), Path(recipe.run_dir) / "tokenizer.model"
    if world.rank == 0:
        if data.arithmetic is not None:
            assert data.train is not None, "check_data refuses it"
            ensure_files(data.arithmetic, train=data.train, held_out=data.held_out, has_preferences=has_preferences)
        # Before the first checkpoint, what is there may have been trained for another run.
        if path is None and latest_step(Path(recipe.run_dir)) is None:
            _train(recipe, trained)
    everyone = world.coordinator(plan.meshes["job"].ranks)
    everyone.barrier("data and tokenizer")
    tokenizer = _open_trained(trained, world.rank) if path is None else open_known(path, recipe)
    check_stop(recipe, tokenizer)
    check_vocabularies(recipe, tokenizer)
    shape, folder = training_shape(recipe, tokenizer), Path(recipe.run_dir) / FOLDER
    queue = data.kafka if data.spool is None else data.spool
    if queue is not None:
        train = open_queue(queue, shape, tokenizer, folder, everyone=everyone)
    else:
        train = open_problems(data.sources, shape, tokenizer, folder, seed=recipe.seed, everyone=everyone)
    held_out = []
    if data.held_out is not None:
        shape = held_out_shape(shape, recipe)
        source = DataSourceConfig(path=data.held_out, file_format=data.file_format)
        (store,) = open_stores([source], shape, folder, everyone=everyone)
        held_out = [
            replace(example_in(store[row], shape), row_number=held_out_number(row)) for row in range(len(store))
        ]

    def images_of(row: int) -> tuple[Image, ...]:
        source, index = source_and_row(row)
        return held_out[index].images if source == HELD_OUT else train.images(row)

    return Job(
        world=world,
        recipe=recipe,
        meshes=plan.meshes,
        tokenizer=tokenizer,
        train=train,
        images=shape.images,
        images_of=None if shape.images is None else images_of,
        held_out=() if has_preferences else tuple((each, prompt_tokens(each, tokenizer)) for each in held_out),
        held_out_solutions=_solutions(recipe, shape, tokenizer, held_out) if recipe.traits.imitates else (),
        held_out_pairs=_pairs(recipe, shape, tokenizer, held_out) if has_preferences and held_out else (),
    )


def note_of_prompts(job: Job) -> str | None:
    """Return what the first prompt is that was seldom meant: text without the chat template, or without its images."""
    if job.tokenizer is None or job.train.num_rows is None:
        return None
    example = job.train.example(0)
    if is_plain(example.prompt, example.begins, job.tokenizer):
        return (
            "plain text; for a chat model set data.prompt_as_message=true (in Python DataProvider(…, "
            "prompt_as_message=True)), which applies its chat template"
        )
    if job.images is None and example.row.get(IMAGES) and reads_images(job.model_of("actor").path):
        return f"text alone; data.images_field={IMAGES} gives the model the images of its rows, too"
    return None


def _solutions(recipe: Recipe, shape: Shape, tokenizer: Tokenizer, held_out: Sequence[Example]) -> tuple[Solution, ...]:
    context = recipe.model.max_context
    return tuple(
        encode_solution(each, tokenizer, max_context=context, ends=ends_of(each, shape, tokenizer)) for each in held_out
    )


def _pairs(
    recipe: Recipe, shape: Shape, tokenizer: Tokenizer, held_out: Sequence[Example]
) -> tuple[tuple[JudgedResponse, JudgedResponse], ...]:
    assert recipe.data.held_out is not None, "they come from there"
    context = recipe.model.max_context
    encoded = [
        encode_responses(each, tokenizer, max_context=context, ends=ends_of(each, shape, tokenizer))
        for each in held_out
    ]
    return pairs_of(encoded, recipe.data.held_out)


def _open_trained(trained: Path, rank: int) -> Tokenizer:
    """Open the tokenizer that the run trained: another would give the texts other tokens.

    Raises:
        DataError: It is gone or damaged, and the message names the copy in the latest checkpoint; or this rank does not
            see it.
    """
    latest = latest_step(trained.parent)
    if latest is None and not trained.is_file():
        raise DataError(
            f"{trained}: the lowest rank trained it, and rank {rank} does not see it; set run_dir to a directory on a "
            "file system that all ranks share"
        )
    try:
        return open_tokenizer(trained)
    except DataError as error:
        if latest is None:
            raise
        copy = step_path(trained.parent, latest) / "actor" / ASSETS / trained.name
        found = str(error).partition("; ")[0] if trained.is_file() else f"{trained}: missing"
        raise DataError(f"{found}; the run's checkpoints were made with it: copy it there from {copy}") from error


def _train(recipe: Recipe, path: Path) -> None:
    shape = training_shape(recipe, None)
    examples = (example for source in recipe.data.sources for example in read_examples(source, shape))
    texts = ((each.prompt, *each.turns, *(judged.text for judged in each.responses)) for each in examples)
    train_tokenizer(map("".join, texts), path=path, vocab_size=recipe.tokenizer.vocab_size)

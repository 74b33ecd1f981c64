"""From a recipe to a job: data and tokenizer made if absent, read by every rank, checked before a model is built."""

from __future__ import annotations

from pathlib import Path

from hybridflow.checkpoint.store import latest_step
from hybridflow.config import Recipe
from hybridflow.data.arithmetic import ensure_files
from hybridflow.data.prompts import Example, PromptSource, encode_prompts, encode_solutions, read_examples
from hybridflow.data.tokenizer import Tokenizer, train_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.parallel.world import World
from hybridflow.roles.job import Job, Problems
from hybridflow.trainer.plan import JobPlan

TOKENIZER_FILE = "tokenizer.model"


def open_job(recipe: Recipe, world: World, plan: JobPlan) -> Job:
    """Read what the job needs. The lowest rank makes files that are absent, while the others wait.

    Collective: all ranks.

    Raises:
        DataError: A file is malformed, or a prompt leaves no room for a response.
        ConfigError: The recipe's vocabulary is smaller than the tokenizer's.
        DeadlineError: A rank did not come.
    """
    data = recipe.data
    if world.rank == 0:
        if data.arithmetic is not None:
            ensure_files(data.arithmetic, train=data.train, held_out=data.held_out)
        # Before the first checkpoint, what is there may have been trained for another run.
        if recipe.tokenizer.path is None and latest_step(Path(recipe.run_dir)) is None:
            _train(recipe)
    world.coordinator(plan.meshes["job"].ranks).barrier("data and tokenizer")
    tokenizer = Tokenizer(_trained_tokenizer(recipe) if recipe.tokenizer.path is None else recipe.tokenizer.path)
    size = recipe.model.vocab_size
    if size is not None and size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size={size} is smaller than the tokenizer's {tokenizer.vocab_size}; raise it, or leave it out"
        )
    train, held_out = read_examples(data.train, data), read_examples(data.held_out, data)
    return Job(
        world=world,
        recipe=recipe,
        meshes=plan.meshes,
        tokenizer=tokenizer,
        train=Problems(
            source=PromptSource(examples=train, seed=recipe.seed),
            prompts=_prompts(recipe, tokenizer, train),
            solutions=encode_solutions(train, tokenizer, max_context=recipe.model.max_context)
            if recipe.warm_start is not None
            else (),
        ),
        held_out=tuple(zip(held_out, _prompts(recipe, tokenizer, held_out), strict=True)),
    )


def _prompts(recipe: Recipe, tokenizer: Tokenizer, examples: tuple[Example, ...]) -> tuple[tuple[int, ...], ...]:
    return encode_prompts(
        examples, tokenizer, max_new_tokens=recipe.rollout.max_new_tokens, max_context=recipe.model.max_context
    )


def _trained_tokenizer(recipe: Recipe) -> Path:
    return Path(recipe.run_dir) / TOKENIZER_FILE


def _train(recipe: Recipe) -> None:
    examples = read_examples(recipe.data.train, recipe.data)
    lines = [
        example.prompt + (example.answer if example.solution is None else example.solution) for example in examples
    ]
    path = _trained_tokenizer(recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    train_tokenizer(lines, path=path, vocab_size=recipe.tokenizer.vocab_size)

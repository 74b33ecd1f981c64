"""From a recipe to a job: data and tokenizer made if absent, read by every rank, checked before a model is built."""

from __future__ import annotations

from pathlib import Path

from hybridflow.checkpoint.store import latest_step
from hybridflow.config import Recipe
from hybridflow.data.arithmetic import ensure_files
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.preferences import check_imitable, encode_responses, pairs_of, read_preferences
from hybridflow.data.prompts import Example, PromptSource, encode_prompts, encode_solutions, read_examples
from hybridflow.data.tokenizer import Tokenizer, check_same_pieces, open_tokenizer, tokenizer_in
from hybridflow.errors import ConfigError
from hybridflow.parallel.world import World
from hybridflow.roles.job import READERS, Job, ReadProblems
from hybridflow.trainer.plan import JobPlan

TOKENIZER_FILE = "tokenizer.model"


def open_job(recipe: Recipe, world: World, plan: JobPlan) -> Job:
    """Read what the job needs. The lowest rank makes files that are absent, while the others wait.

    Collective: all ranks.

    Raises:
        DataError: A file is malformed, a prompt leaves no room for a response, or models have different tokenizers.
        ConfigError: A model's vocabulary is smaller than the tokenizer's, or the model has no tokenizer.
        DeadlineError: A rank did not come.
    """
    data = recipe.data
    path = tokenizer_path(recipe)
    if world.rank == 0:
        if data.arithmetic is not None:
            has_preferences = recipe.preset.has_preferences
            ensure_files(data.arithmetic, train=data.train, held_out=data.held_out, has_preferences=has_preferences)
        # Before the first checkpoint, what is there may have been trained for another run.
        if path is None and latest_step(Path(recipe.run_dir)) is None:
            _train(recipe)
    world.coordinator(plan.meshes["job"].ranks).barrier("data and tokenizer")
    tokenizer = open_tokenizer(_trained_tokenizer(recipe) if path is None else path)
    check_vocabularies(recipe, tokenizer)
    train, held_out = _examples(recipe, data.train), _examples(recipe, data.held_out)
    context, has_preferences = recipe.model.max_context, recipe.preset.has_preferences
    is_imitating = recipe.warm_start is not None or recipe.algorithm == "sft"
    if has_preferences and is_imitating:
        check_imitable(train, data)
    judged = [encode_responses(each, tokenizer, max_context=context) for each in (train, held_out)]
    return Job(
        world=world,
        recipe=recipe,
        meshes=plan.meshes,
        tokenizer=tokenizer,
        train=ReadProblems(
            source=PromptSource(examples=train, seed=recipe.seed),
            prompts=_prompts(recipe, tokenizer, train),
            solutions=encode_solutions(train, tokenizer, max_context=context) if is_imitating else (),
            all_responses=judged[0],
        ),
        held_out=() if has_preferences else tuple(zip(held_out, _prompts(recipe, tokenizer, held_out), strict=True)),
        held_out_pairs=pairs_of(judged[1], data.held_out) if has_preferences else (),
    )


def _examples(recipe: Recipe, path: str) -> tuple[Example, ...]:
    if recipe.preset.has_preferences:
        return read_preferences(path, recipe.data, is_paired=recipe.preset.is_paired)
    return read_examples(path, recipe.data)


def _prompts(recipe: Recipe, tokenizer: Tokenizer, examples: tuple[Example, ...]) -> tuple[tuple[int, ...], ...]:
    return encode_prompts(
        examples, tokenizer, max_new_tokens=recipe.rollout.max_new_tokens, max_context=recipe.model.max_context
    )


def tokenizer_path(recipe: Recipe) -> Path | None:
    """The tokenizer that the recipe names, or the model's own; None where one is to be trained.

    Raises:
        ConfigError: The model has none.
    """
    if recipe.tokenizer.path is not None:
        return Path(recipe.tokenizer.path)
    if recipe.model.path is None:
        return None
    found = tokenizer_in(recipe.model.path)
    if found is None:
        raise ConfigError(
            f"tokenizer.path: missing; model.path={recipe.model.path!r} has no tokenizer, and its weights know no "
            "other: name the one that it was trained with"
        )
    return found


def check_vocabularies(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Refuse models that do not know the tokenizer's tokens.

    Raises:
        ConfigError: A model's vocabulary is too small.
        DataError: A model was trained with another tokenizer.
    """
    for key, model in {name: recipe.model_of(name) for name in READERS}.items():
        prefix = "model" if model is recipe.model else f"{key}.model"
        if model.vocab_size is not None and model.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"{prefix}.vocab_size={model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}; raise "
                "it, or leave it out; of a model with a path, name the tokenizer that it was trained with"
            )
        own = None if model.path is None else tokenizer_in(model.path)
        if own is not None and own != tokenizer.path:
            check_same_pieces(tokenizer, open_tokenizer(own), whose=f"{prefix}.path={model.path!r}")


def _trained_tokenizer(recipe: Recipe) -> Path:
    return Path(recipe.run_dir) / TOKENIZER_FILE


def _train(recipe: Recipe) -> None:
    examples = _examples(recipe, recipe.data.train)
    texts = [(*example.turns, *(judged.text for judged in example.responses)) for example in examples]
    lines = ["".join((example.prompt, *text)) for example, text in zip(examples, texts, strict=True)]
    path = _trained_tokenizer(recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    train_tokenizer(lines, path=path, vocab_size=recipe.tokenizer.vocab_size)

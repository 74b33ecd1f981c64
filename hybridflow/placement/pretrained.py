"""Models that begin with the weights of a directory, in any layout: each rank fills what it holds, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import nn

from hybridflow.checkpoint.formats.in_memory import in_memory_model
from hybridflow.checkpoint.formats.registry import open_model
from hybridflow.checkpoint.formats.source import Source
from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.checkpoint.store import BASE
from hybridflow.config.recipe import CRITICS
from hybridflow.data.chat import FILE as TEMPLATE
from hybridflow.data.chat import chat_template
from hybridflow.data.problems import StoredProblems, template_of
from hybridflow.data.tokenizer import JSON, PIECES, Tokenizer
from hybridflow.errors import ConfigError
from hybridflow.families.assets import (
    ASSETS,
    CONFIG,
    GENERATION,
    OF_MODEL,
    asset_names,
    ends_in,
    is_of_model,
    parse_json,
    read_assets,
    to_json,
)
from hybridflow.families.model import ModelConfig
from hybridflow.families.quantization import plain_assets
from hybridflow.families.vision import with_origin
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.shapes import model_spec
from hybridflow.parallel.megatron import rank_sets
from hybridflow.parallel.world import World
from hybridflow.placement.job import Job
from hybridflow.placement.model_on_mesh import ModelOnMesh
from hybridflow.placement.user_objects import in_memory_assets, user_class_of


def from_pretrained(
    path: str | Path | nn.Module | Source,
    world: World,
    mesh: DeviceMesh,
    *,
    role: Literal["actor", "critic", "reward"] = "actor",
    max_context: int | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    seed: int = 1,
) -> ModelOnMesh:
    """Load a model from a Hugging Face directory, a hybridflow model directory, or a model in memory.

    Collective: all ranks of the job, also those outside the mesh.

    Args:
        path: The directory; or a model of ``transformers`` or megatron-core, see
            ``checkpoint.formats.in_memory.in_memory_model``.
        world: This rank and the others.
        mesh: Where the model is to be.
        role: What it is to be: an actor is a causal language model, a reward a scorer with one label; a critic may be
            made of either, and of a language model gets a new value head.
        max_context: Longest sequence in tokens; None: the model's own.
        dtype: Number format of the weights; None: the model's own.
        seed: Seed of a new value head.

    Raises:
        CheckpointError: The directory is damaged, or its tensors are not those of its settings.
        ConfigError: There is no such directory, its model is not computed here, or is none for the role.
    """
    source = open_model(Path(path)) if isinstance(path, str | Path) else in_memory_model(path)
    check_table(source)
    if source.has_value_head != (role == "reward") and role != "critic":
        found, expected = (
            ("a scorer", "a language model") if source.has_value_head else ("a language model", "a scorer")
        )
        raise ConfigError(f"{source.path}: found {found}, expected {expected} for the {role}; choose another directory")
    model = replace(
        source.model,
        path=str(path) if isinstance(path, str | Path) else None,
        max_context=source.model.max_context if max_context is None else max_context,
        dtype=source.model.dtype if dtype is None else dtype,
    )
    has_value_head = role != "actor"
    world.make_groups(rank_sets([mesh], world.size))
    spec = model_spec(model, has_value_head=has_value_head)
    made = ModelOnMesh(world, mesh, model, spec, seed=seed)
    if world.rank in mesh:
        made.build(has_value_head=has_value_head)
        made.load(source)
    return made


def check_table(source: Source) -> None:
    """Refuse a model that runs in ``transformers``, which only training has.

    Raises:
        ConfigError: It does.
    """
    if source.model.implementation == "transformers":
        raise ConfigError(
            f"{source.path}: a {source.family} that runs in transformers is trained here, not served; generate with "
            "transformers or vLLM, from a checkpoint after hybridflow convert --to hf"
        )


def assets_of(job: Job, role: str) -> tuple[str | None, dict[str, bytes]]:
    """Return the family and the small files that are written with a role's weights everywhere.

    They are those of the model that was given or of the directory that the recipe names, with the tokenizer and the
    chat template that the job uses. A run that goes on needs no weights there.
    """
    family, assets = given_assets(job, role)
    # A program that gives tokens alone has none, whatever the type says.
    if job.tokenizer is None:
        return family, assets  # type: ignore[unreachable]
    file = job.tokenizer.path
    beside = read_assets(file.parent, asset_names(file.parent), follows_links=True)
    tokenizer = {name: content for name, content in beside.items() if name not in OF_MODEL}
    tokenizer[JSON if file.suffix == ".json" else PIECES] = file.read_bytes()
    if role in ("actor", BASE):
        tokenizer |= _template(job)
    assets = {name: content for name, content in assets.items() if is_of_model(name)}
    is_scorer = role in CRITICS or job.recipe.traits.is_scorer
    if CONFIG not in assets and user_class_of(job, role) is None:
        assets[CONFIG] = _special_ids(job.tokenizer, is_scorer=is_scorer)
    if CONFIG in assets:
        if is_scorer:
            assets |= _padded(assets, job.tokenizer)
        elif role in ("actor", BASE):
            assets |= _aligned(assets, job.tokenizer)
    return family, {**assets, **tokenizer}


def _template(job: Job) -> dict[str, bytes]:
    """Return the chat template that the job's prompts were made with, where it is not the tokenizer's own."""
    train = job.train
    text = train.template if isinstance(train, StoredProblems) else template_of(job.recipe.data, job.tokenizer)
    return {} if text in (None, chat_template(job.tokenizer)) else {TEMPLATE: text.encode()}


def _special_ids(tokenizer: Tokenizer, *, is_scorer: bool) -> bytes:
    """Return a ``config.json`` of special tokens alone, for a model that is made from the recipe's settings."""
    eos_ids = tokenizer.stop_ids
    values: dict[str, object] = {"bos_token_id": tokenizer.bos_id}
    values["eos_token_id"] = eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)
    # A scorer's is a question of its own.
    return to_json(values if is_scorer else {**values, "pad_token_id": tokenizer.pad_id})


def _aligned(assets: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return a ``generation_config.json`` with the tokenizer's end of sequence and a padding id."""
    ends = ends_in(assets)
    if tokenizer.eos_id in ends.eos_ids and ends.pad_id is not None:
        return {}
    values = parse_json(assets[GENERATION], GENERATION) if GENERATION in assets else {}
    eos_ids = list(dict.fromkeys((tokenizer.eos_id, *ends.eos_ids)))
    values["eos_token_id"] = eos_ids[0] if len(eos_ids) == 1 else eos_ids
    values["pad_token_id"] = tokenizer.pad_id if ends.pad_id is None else ends.pad_id
    return {GENERATION: to_json(values)}


def _padded(assets: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return a scorer's ``config.json`` with the tokenizer's padding id, without which transformers takes no batch.

    An id that ends a response is no padding to it: the score is that of the last token before the padding.
    """
    values = parse_json(assets[CONFIG], CONFIG)
    if values.get("pad_token_id") is not None or tokenizer.pad_id in tokenizer.stop_ids:
        return {}
    return {CONFIG: to_json({**values, "pad_token_id": tokenizer.pad_id})}


def align_ends(job: Job) -> None:
    """Let responses end, too, where the actor's own settings say so, wherever its tokenizer lies."""
    _, assets = given_assets(job, "actor")
    known = [index for index in ends_in(assets).eos_ids if 0 <= index < job.vocab_size]
    job.tokenizer.stop_ids = tuple(dict.fromkeys((*job.tokenizer.stop_ids, *known)))


def given_assets(job: Job, role: str) -> tuple[str | None, dict[str, bytes]]:
    """Return the family and the small files of a role's model as it was given, or as its directory has them."""
    return in_memory_assets(job, role) or _in_directory(job.recipe.model_of(role))


def _in_directory(model: ModelConfig) -> tuple[str | None, dict[str, bytes]]:
    if model.path is None:
        return None, {}
    settings = read_model_info(Path(model.path))
    if settings.assets is None:
        return None, {}
    path = Path(model.path)
    # Without its code nobody could load it again.
    code = sorted(each.name for each in settings.assets.glob("*.py")) if model.trust_remote_code else []
    assets = plain_assets(read_assets(settings.assets, (*ASSETS, *code), follows_links=True))
    is_original = settings.assets == path and model.implementation == "megatron"
    return settings.family, with_origin(assets, path) if is_original else assets

"""Models that a Python program has in memory: what they say of themselves, and their weights as any checkpoint's."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from hybridflow.checkpoint.formats.huggingface import HuggingFaceSource
from hybridflow.checkpoint.formats.in_memory_megatron import MegatronSource, read_megatron
from hybridflow.checkpoint.formats.source import Source
from hybridflow.checkpoint.tensor_file import HeldTensors
from hybridflow.config.recipe import MODEL_SECTIONS
from hybridflow.errors import ConfigError
from hybridflow.families.assets import CONFIG, GENERATION
from hybridflow.families.config_json import Described, read_config
from hybridflow.families.model_info import ModelInfo
from hybridflow.families.other_config import has_no_table, read_info
from hybridflow.families.quantization import plain_assets
from hybridflow.families.vision import vision_model
from hybridflow.models.hf_model import names_as_saved
from hybridflow.models.user_model import user_model_info


def is_model(given: object) -> bool:
    """Return whether an object is a model whose settings and weights can be taken: see ``in_memory_model``."""
    is_wrapped = any(base.__module__.partition(".")[0] == "peft" for base in type(given).__mro__)
    return isinstance(given, Source | GPTModel) or is_wrapped or _library_class(given) is not None


def in_memory_model(given: Any, *, vocab_size: int | None = None) -> Source:
    """Return a model in memory as a role begins with it: its settings and its weights, in any layout.

    Takes a ``PreTrainedModel`` of ``transformers`` of a family in ``hybridflow.families``, causal language model or
    scorer with one label; or a ``GPTModel`` of megatron-core, whole or cut by its own process groups. The weights are
    copied when a role is made: the model itself stays as it is. ``placement.library_models`` takes other families.

    Collective: of a ``GPTModel`` that is cut, all ranks that hold a part of it.

    Args:
        given: The model.
        vocab_size: True vocabulary of a ``GPTModel``, without the padding that its embedding has; None: all rows.

    Raises:
        ConfigError: It is no such model, or asks for what is not computed here; names the setting.
        CheckpointError: Its tensors are not those of its settings.
    """
    if isinstance(given, Source):
        return given
    return MegatronSource(given, vocab_size=vocab_size) if isinstance(given, GPTModel) else _TransformersSource(given)


def in_memory_info(objects: Mapping[str, Any]) -> dict[str, ModelInfo]:
    """Return what models that a program gives for roles say of themselves, for ``recipe.load.recipe_from_dict``.

    Args:
        objects: Role -> what was given; functions and the like are passed over.

    Returns:
        Section of the recipe -> settings. The reference has no section: it has the actor's settings.

    Raises:
        ConfigError: A model asks for what is not computed here.
    """
    found = {}
    for role, given in objects.items():
        settings = _settings(given) if role in MODEL_SECTIONS else None
        if settings is not None:
            found[MODEL_SECTIONS[role]] = settings
    return found


def _settings(given: Any) -> ModelInfo | None:
    """Return the settings; None: the object is no model."""
    if isinstance(given, Source):
        return ModelInfo(given.model, given.has_value_head, given.family, None)
    if isinstance(given, GPTModel):
        return ModelInfo(read_megatron(given), False, None, None)
    if not is_model(given):
        return user_model_info(given)
    return read_info(_config(given), where=f"{type(given).__name__}.config")


def library_assets(model: Any) -> tuple[str, dict[str, bytes]]:
    """Return the type of a model of ``transformers``, and the small files that it is saved with.

    Raises:
        ConfigError: It is none, or computes something else than its class.
    """
    values = _config(model)
    return str(values["model_type"]), _small_files(model, values)


def _small_files(model: Any, values: dict[str, Any]) -> dict[str, bytes]:
    generation = getattr(model, "generation_config", None)
    found = plain_assets({CONFIG: json.dumps(values, indent=2).encode(), **_code_of(model)})
    return found if generation is None else {**found, GENERATION: generation.to_json_string().encode()}


class _TransformersSource(HuggingFaceSource):
    """The weights of a model of ``transformers``, see ``source.Source``."""

    def __init__(self, model: Any) -> None:
        described, values = _describe(model)
        path = Path(f"<{type(model).__name__} in memory>")
        state = names_as_saved(model, model.state_dict())
        if described.model.tied_embeddings:
            _drop_copy(state)
        self._take(path, described, {str(path): HeldTensors(path, state)}, kind=vision_model(values))
        self._assets = _small_files(model, values)

    def assets(self) -> dict[str, bytes]:
        """See ``Source``."""
        return dict(self._assets)

    def identity(self) -> str:
        """See ``Source``; of settings, names and shapes alone, since what is in memory has no time."""
        rows = [[name, *entry] for file in self._files.values() for name, entry in file.entries.items()]
        return hashlib.sha256(json.dumps([rows, self._assets[CONFIG].decode()]).encode()).hexdigest()


def _library_class(given: object) -> type | None:
    """Return the ``transformers`` class of a model; None: it has none."""
    ours = [base for base in type(given).__mro__ if base.__module__.startswith("transformers.")]
    return ours[0] if any(base.__name__ == "PreTrainedModel" for base in ours) else None


def _describe(model: Any) -> tuple[Described, dict[str, Any]]:
    """Return family and settings of a model of ``transformers``, and its ``config.json``.

    Raises:
        ConfigError: It is none, or of an unknown family, or computes something else than its class.
    """
    values, name = _config(model), type(model).__name__
    if has_no_table(values):
        raise ConfigError(
            f"{name}: model_type={values['model_type']!r} has no table in docs/families.md, or not for its "
            "settings: it is trained here, in transformers, and not served; generate with RolloutWorker(model, "
            "engine='hf') or vLLM"
        )
    return read_config(values, where=f"{name}.config"), values


def _config(model: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a model of ``transformers``.

    Raises:
        ConfigError: It is none, or computes something else than its class.
    """
    kind: Any = _library_class(model)
    name = type(model).__name__
    if hasattr(model, "merge_and_unload"):
        raise ConfigError(
            f"{name}: is a model with PEFT's adapters; call merge_and_unload() and give what that returns, or give the "
            "base and train adapters of our own: actor.lora"
        )
    if kind is None:
        raise ConfigError(
            f"{name}: expected a PreTrainedModel of transformers, a GPTModel of megatron-core, or a class of your own "
            "as docs/extend.md shows; or name a directory: model.path"
        )
    # As save_pretrained writes it, so that a model in memory and its directory are the same model.
    values = json.loads(model.config.to_json_string())
    has_code = bool(_code_of(model)) and has_no_table(values)
    if type(model).forward is not kind.forward and not has_code:
        raise ConfigError(
            f"{name}: overrides forward of {kind.__name__}, which is what would be computed here; give the "
            f"{kind.__name__} itself, or wrap yours in a class of your own (docs/extend.md)"
        )
    head = model.get_output_embeddings() if values.get("tie_word_embeddings") else None
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        # As of Mistral Small 3.1: transformers takes them to be tied, and finds in the files that they are not.
        values["tie_word_embeddings"] = False
    dtype = next(parameter.dtype for parameter in model.parameters())
    values = {key: value for key, value in values.items() if key not in ("dtype", "torch_dtype")}
    architecture = name if has_code else kind.__name__
    return values | {"architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")}


def _code_of(model: Any) -> dict[str, bytes]:
    """Return the Python files of a model whose directory brought code, which ``transformers`` keeps side by side."""
    if type(model).__module__.partition(".")[0] != "transformers_modules":
        return {}
    folder = Path(inspect.getfile(type(model))).parent
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"}


def _drop_copy(state: dict[str, Tensor]) -> None:
    """Drop the second copy of an embedding that is tied to the output."""
    seen: dict[tuple[int, torch.Size], str] = {}
    # Of a vision-language model the output may come first.
    for name, tensor in sorted(state.items(), key=lambda item: item[0].endswith("lm_head.weight")):
        if seen.setdefault((tensor.data_ptr(), tensor.shape), name) != name and tensor.device.type != "meta":
            del state[name]

"""Vision-language models whose language model has a table: its part of ``config.json``, and the names of its tensors.

Only the language model is read and trained. An export is the whole model again: the other tensors are copied from the
original directory, which ``config.json`` names on its way through our checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hybridflow.errors import CheckpointError
from hybridflow.families.assets import CONFIG, parse_json, to_json
from hybridflow.families.family import EMBEDDING, Rule, in_layer
from hybridflow.families.tables import FAMILIES

ORIGIN = "_name_or_path"
"""Key of ``config.json`` by which ``transformers`` tells where a model came from. Here it is the original directory."""

_TEXT = "text_config"
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_MROPE = ("mrope_section", "mrope_interleaved")
"""How the rotated dims are dealt to time, height and width, which are equal where all tokens are text."""


@dataclass(frozen=True, kw_only=True)
class VisionModel:
    """A vision-language model.

    Attributes:
        name: Its ``model_type``.
        causal: Its architecture.
        text: ``model_type`` of its ``text_config``.
        family: Name of the table that describes its language model.
        defaults: Values of keys that ``text_config`` may leave out, where the table has none or others.
        unused: Keys of the table that its language model does not have.
        rules: Tensors that files may have in another form than the table.
        saved_rules: The same tensors in a third form, which ``transformers`` 5 saves.
        is_flat: Whether older files have the keys of ``text_config`` beside ``vision_config``.
        text_ties: Whether embeddings are tied where either the whole or ``text_config`` says so, else where the whole
            does.
        image_axes: How pairs of rotated dims are dealt to time, height and width: in sections, or in turns; None: its
            images are not read.
        is_deep: Whether the tower adds something behind the first layers, too.
    """

    name: str
    causal: str
    text: str
    family: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    saved_rules: tuple[Rule, ...] = ()
    is_flat: bool = False
    text_ties: bool = False
    image_axes: Literal["sections", "turns"] | None = None
    is_deep: bool = False


_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

_GEMMA3 = VisionModel(
    name="gemma3",
    causal="Gemma3ForConditionalGeneration",
    text="gemma3_text",
    family="gemma3_text",
    # Published files leave all of these out.
    defaults={"vocab_size": 262208, "num_attention_heads": 8},
)

_GEMMA4 = VisionModel(name="gemma4", causal="Gemma4ForConditionalGeneration", text="gemma4_text", family="gemma4_text")

_QWEN3_VL = VisionModel(
    name="qwen3_vl",
    causal="Qwen3VLForConditionalGeneration",
    text="qwen3_vl_text",
    family="qwen3",
    defaults={"max_position_embeddings": 128000, "rope_theta": 500000.0},
    unused=_WINDOW,
    image_axes="turns",
    is_deep=True,
)

_QWEN3_5 = VisionModel(
    name="qwen3_5",
    causal="Qwen3_5ForConditionalGeneration",
    text="qwen3_5_text",
    family="qwen3_5_text",
    image_axes="turns",
)

_FC1, _FC2 = ("mlp.experts.{expert}.linear_fc1.weight", "mlp.experts.{expert}.linear_fc2.weight")
_FUSED_EXPERTS = (
    in_layer(_FC1, "mlp.experts.gate_up_proj", form="halves"),
    in_layer(_FC2, "mlp.experts.down_proj"),
)

_QWEN3_5_MOE = VisionModel(
    name="qwen3_5_moe",
    causal="Qwen3_5MoeForConditionalGeneration",
    text="qwen3_5_moe_text",
    family="qwen3_5_moe_text",
    rules=_FUSED_EXPERTS,
    image_axes="turns",
)

_QWEN2_5_VL = VisionModel(
    name="qwen2_5_vl",
    causal="Qwen2_5_VLForConditionalGeneration",
    text="qwen2_5_vl_text",
    family="qwen2",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80},
    unused=("head_dim",),
    is_flat=True,
    text_ties=True,
    image_axes="sections",
)

_MISTRAL3 = VisionModel(name="mistral3", causal="Mistral3ForConditionalGeneration", text="mistral", family="mistral")

_GLM4V = VisionModel(
    name="glm4v",
    causal="Glm4vForConditionalGeneration",
    text="glm4v_text",
    family="glm4",
    defaults={"head_dim": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "partial_rotary_factor": 1.0},
    unused=("attention_bias", "head_dim"),
    text_ties=True,
)

_QWEN3_VL_MOE = VisionModel(
    name="qwen3_vl_moe",
    causal="Qwen3VLMoeForConditionalGeneration",
    text="qwen3_vl_moe_text",
    family="qwen3_moe",
    defaults={
        **{"num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 500000.0},
        **{"moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": True},
    },
    # Its router always divides by the sum.
    unused=(*_WINDOW, "norm_topk_prob"),
    rules=(
        in_layer(_FC1, "mlp.experts.gate_up_proj", form="transposed_halves"),
        in_layer(_FC2, "mlp.experts.down_proj", form="transposed"),
    ),
    saved_rules=_FUSED_EXPERTS,
    image_axes="turns",
    is_deep=True,
)

_GLM4V_MOE = VisionModel(
    name="glm4v_moe",
    causal="Glm4vMoeForConditionalGeneration",
    text="glm4v_moe_text",
    family="glm4_moe",
    defaults={"max_position_embeddings": 65536, "attention_bias": True},
    unused=("use_qk_norm",),
    text_ties=True,
)

VISION_MODELS = {
    model.name: model
    for model in (
        *(_GEMMA3, _GEMMA4, _QWEN3_VL, _QWEN3_5, _QWEN3_5_MOE, _QWEN2_5_VL, _MISTRAL3, _GLM4V, _QWEN3_VL_MOE),
        _GLM4V_MOE,
    )
}


def vision_model(values: Mapping[str, Any]) -> VisionModel | None:
    """Return which vision-language model a parsed ``config.json`` is of; None: another, or not whole, or in codes."""
    name = values.get("model_type")
    found = VISION_MODELS.get(name) if isinstance(name, str) else None
    if found is None:
        return None
    text = _text_of(values, found)
    if not isinstance(text, Mapping) or text.get("model_type", found.text) != found.text:
        return None
    is_coded = any(each.get("quantization_config") is not None for each in (values, text))
    is_whole = values.get("architectures") in (None, [found.causal])
    return found if is_whole and not is_coded else None


def _text_of(values: Mapping[str, Any], found: VisionModel) -> Any:
    """Return what a ``config.json`` has as the settings of the language model."""
    text = values.get(_TEXT)
    return {**values, "model_type": found.text} if text is None and found.is_flat else text


def language_model(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``config.json`` of the language model alone of a vision-language model; any other as it is."""
    found = vision_model(values)
    if found is None:
        return values
    table = FAMILIES[found.family]
    told = _text_of(values, found)
    named = {table.aliases.get(key, key) for key in told}
    text = {key: value for key, value in found.defaults.items() if key not in named or key in found.unused}
    text |= {key: value for key, value in told.items() if key not in found.unused}
    # As transformers has it: whether the output layer is the embedding is the whole model's to say.
    above = {key: values[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in values}
    above.setdefault("tie_word_embeddings", table.defaults["tie_word_embeddings"])
    if found.text_ties:
        above["tie_word_embeddings"] = above["tie_word_embeddings"] or told.get("tie_word_embeddings", False)
    text |= {key: _plain_rotary(text[key]) for key in ("rope_scaling", "rope_parameters") if key in text}
    return {**text, **above, "model_type": table.name, "architectures": [table.causal]}


def rotary_sections(values: Mapping[str, Any], kind: VisionModel) -> list[int]:
    """Return how many pairs of rotated dims time, height and width turn.

    Args:
        values: ``config.json`` of the whole.
        kind: Which model it is.

    Raises:
        KeyError: It does not say.
    """
    told = _text_of(values, kind)
    rotary = told.get("rope_parameters") or told.get("rope_scaling") or {}
    return [int(count) for count in rotary[_MROPE[0]]]


def _plain_rotary(told: Any) -> Any:
    """Return rotary settings without what tells pictures from text."""
    if not isinstance(told, Mapping):
        return told
    plain = {key: value for key, value in told.items() if key not in _MROPE}
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}


def with_language_model(values: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a vision-language model with other settings of its language model.

    Args:
        values: The whole.
        changes: Keys of its language model.
    """
    text = values.get(_TEXT)
    if text is None:
        return {**values, **changes}
    return {**values, _TEXT: {**text, **changes}}


def with_origin(assets: Mapping[str, bytes], folder: Path) -> dict[str, bytes]:
    """Return the small files of a directory; that of a vision-language model is named in its ``config.json``."""
    values = parse_json(assets[CONFIG], str(folder / CONFIG)) if CONFIG in assets else {}
    if vision_model(values) is None:
        return {**assets}
    return {**assets, CONFIG: to_json({**values, ORIGIN: str(folder.absolute())})}


def has_vision(assets: Mapping[str, bytes]) -> bool:
    """Return whether the small files are those of a vision-language model."""
    return CONFIG in assets and vision_model(parse_json(assets[CONFIG], CONFIG)) is not None


class TextNames(NamedTuple):
    """What the files of a vision-language model call the tensors of its language model.

    Attributes:
        prefix: Begins the names of all but the output layer.
        head: The output layer.
        rules: Those that the files have in another form than the table, as in a model of text alone.
    """

    prefix: str
    head: str
    rules: tuple[Rule, ...] = ()

    def of(self, name: str) -> str:
        """Return the name of a tensor that ``name`` is in a model of text alone."""
        if name == _HEADS[0]:
            return self.head
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name

    def has(self, name: str) -> bool:
        """Return whether a name is one of the language model's."""
        return name == self.head or name.startswith(self.prefix)


NAMES_IN_MEMORY = TextNames(_PREFIXES[0], _HEADS[0])
"""What ``transformers`` calls the tensors of the language model within a vision-language model."""


def text_alone(names: Iterable[str]) -> TextNames | None:
    """Return what files of a model of text alone call its tensors; None: as its table does.

    A language model that ``transformers`` loads out of a whole Qwen3.5 is saved under the names of the whole.
    """
    return NAMES_IN_MEMORY if any(name.startswith(NAMES_IN_MEMORY.prefix) for name in names) else None


def text_names(shapes: Mapping[str, tuple[int, ...]], kind: VisionModel, where: str) -> TextNames:
    """Return what the files of a vision-language model call the tensors of its language model.

    Args:
        shapes: Those of all tensors.
        kind: Which model it is.
        where: What messages call the files.

    Raises:
        CheckpointError: There is no language model.
    """
    rules = FAMILIES[kind.family].rules
    (embedding,) = (rule.hf[0] for rule in rules if rule.logical == EMBEDDING)
    head = next((name for name in _HEADS if name in shapes), _HEADS[0])
    known = [TextNames(prefix, head) for prefix in _PREFIXES]
    found = next((each for each in known if each.of(embedding) in shapes), None)
    if found is None:
        expected = " or ".join(each.of(embedding) for each in known)
        raise CheckpointError(
            f"{where}: missing: {expected}, the embedding of a vision-language model; restore it, or give the {CONFIG} "
            "that belongs to these tensors"
        )
    width = shapes[found.of(embedding)][-1]
    first = [found.of(rule.hf[0].format(layer=0)) for rule in kind.rules]
    if not all(name in shapes for name in first):
        return found
    # As transformers has it: where the shapes tell nothing, it is the form in which it saves.
    is_saved = all(shapes[name][-1:] == (width,) for name in first if name.endswith("gate_up_proj"))
    return found._replace(rules=kind.saved_rules if kind.saved_rules and is_saved else kind.rules)

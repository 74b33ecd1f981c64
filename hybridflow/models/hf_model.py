"""Models of ``transformers`` as actors and critics: any causal language model. The one door to ``transformers``.

They are classes as in ``user_model``: whole on each rank. A reward model is a critic that is not trained.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.assets import CONFIG, PROCESSORS, read_json, to_json
from hybridflow.families.family import ROUTER_BIASES
from hybridflow.families.model import ModelConfig
from hybridflow.families.vision import language_model, vision_model
from hybridflow.families.weight_files import read_shapes
from hybridflow.models.adapters import is_factor
from hybridflow.models.user_model import ActorModel, CriticModel
from hybridflow.reshard.views import DTYPE_NAMES, TORCH_DTYPES

Filling = Literal["read", "later", "never"]
"""What fills a module's weights: the directory, somebody else before its use, or nobody: it has no memory."""

ADAPTER = "default"
"""What PEFT calls the one adapter of a model."""

_RENAMED = {
    ".base_layer.": ".",
    f".lora_A.{ADAPTER}.weight": ".lora.A",
    f".lora_B.{ADAPTER}.weight": ".lora.B",
}
_CAUSAL, _SCORER = "AutoModelForCausalLM", "ForSequenceClassification"

_UNCACHED = ("minimax", "moshi", "recurrent_gemma")
"""Types of models that compute something else with their cache than without it.

MiniMax takes the length of its cache from the first layer, which has none if it is a recurrent one. RecurrentGemma
begins a prompt of one token with the state of the batch before. Moshi's window is another with its cache.
"""

_UNPADDED = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
    *("llama4", "llama4_text", "rwkv", "trocr", "whisper"),
)
"""Types of models for which a sample with padding before it is another one.

Their positions, or their recurrent states, count the padding too, whatever the mask says. Of Llama 4 these are the
positions that scale its attention beyond ``floor_scale`` tokens.
"""


class TransformersActor(ActorModel):
    """A causal language model of ``transformers``. Its tensors have the names that they have there.

    The factors of an adapter are named after their layer, as in ``models.adapters``: ``….q_proj.lora.A``.

    Dropout is off, also while it learns: the sampler's log-probabilities are to be the trainer's.

    Args:
        inner: The module of ``transformers``.
        vocab_size: Token ids that are chosen among.
        max_context: Longest sequence.

    Attributes:
        inner: The module of ``transformers``.
    """

    def __init__(self, inner: Any, *, vocab_size: int, max_context: int) -> None:
        super().__init__()
        self.vocab_size, self.max_context = vocab_size, max_context
        self.inner = inner
        self.train(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """See ``ActorModel.forward``."""
        logits: Tensor = self.inner(input_ids=input_ids, use_cache=False).logits
        return logits

    def train(self, mode: bool = True) -> TransformersActor:
        """Note the mode; the module computes as in evaluation in both."""
        self.training = mode
        self.inner.eval()
        return self

    @contextlib.contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Switch the adapters off for the duration."""
        for each in self._adapted():
            each.enable_adapters(False)
        try:
            yield
        finally:
            for each in self._adapted():
                each.enable_adapters(True)

    def _adapted(self) -> list[Any]:
        """Return the layers with an adapter, which are PEFT's."""
        return [each for each in self.inner.modules() if hasattr(each, "lora_A")]

    def updates(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the weights that have an adapter, each with ``scale * B A``, of the weight's number format."""
        for each in self._adapted():
            yield each.get_base_layer().weight, each.get_delta_weight(ADAPTER)

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors that are saved but the adapters', with the updates of these."""
        updates = {id(weight): update for weight, update in self.updates()}
        saved = self.inner.state_dict().keys()
        buffers = [(name, each) for name, each in self.inner.named_buffers() if name in saved]
        for name, each in [*self.named_parameters(), *buffers]:
            if not is_factor(name):
                yield name, each + updates[id(each)] if id(each) in updates else each

    # Names as in transformers, without that of the attribute.
    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Yield parameters by their names in ``transformers``."""
        if not recurse:
            return super().named_parameters(prefix, recurse, remove_duplicate)
        found = self.inner.named_parameters(prefix, recurse, remove_duplicate)
        return ((_told(name), each) for name, each in found)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Yield buffers by their names in ``transformers``."""
        if not recurse:
            return super().named_buffers(prefix, recurse, remove_duplicate)
        return self.inner.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module of ``transformers``."""
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of the module of ``transformers``."""
        return self.inner.load_state_dict(*args, **kwargs)


class TransformersCritic(CriticModel):
    """The backbone of a model of ``transformers`` below a value head of ours.

    The backbone's tensors have the names that they have in the causal language model, so that a critic can begin as the
    actor; the head is ``value_head.weight``, ``[1, hidden]``. Dropout is off, as in ``TransformersActor``.

    Args:
        backbone: The module of ``transformers`` that gives hidden states.
        prefix: Its name in the causal language model.
        hidden_size: Width of the hidden states.
        max_context: Longest sequence.
    """

    def __init__(self, backbone: Any, *, prefix: str, hidden_size: int, max_context: int) -> None:
        super().__init__()
        self.max_context = max_context
        self._prefix = prefix
        self.add_module(prefix, backbone)
        parameter = next(backbone.parameters())
        self.value_head = nn.Linear(hidden_size, 1, bias=False, dtype=parameter.dtype, device=parameter.device)
        self.train(False)

    def values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See ``CriticModel.values``."""
        backbone: Any = self.get_submodule(self._prefix)
        hidden: Tensor = backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        values: Tensor = self.value_head(hidden)[:, :, 0]
        return values

    def train(self, mode: bool = True) -> TransformersCritic:
        """Note the mode; the module computes as in evaluation in both."""
        self.training = mode
        self.get_submodule(self._prefix).eval()
        return self


def _told(name: str) -> str:
    """Return a parameter's name without what PEFT adds to it."""
    for found, told in _RENAMED.items():
        name = name.replace(found, told)
    return name


def make_actor(folder: Path, model: ModelConfig, *, filling: Filling) -> TransformersActor:
    """Make a causal language model of a directory, in host memory.

    Args:
        folder: Has ``config.json``, and the weights if they are read.
        model: The settings of the recipe.
        filling: What fills its weights.

    Raises:
        ConfigError: ``transformers`` is not there, or has no such model.
        CheckpointError: The weights are not the model's.
    """
    return wrap_actor(_make(_CAUSAL, folder, model, filling), model)


def wrap_actor(inner: Any, model: ModelConfig) -> TransformersActor:
    """Return a causal language model of ``transformers`` as an actor, with the settings of the recipe.

    Raises:
        ConfigError: It is not causal.
    """
    _check_causal(inner)
    return TransformersActor(inner, vocab_size=model.known_vocab_size, max_context=model.max_context)


def make_critic(folder: Path, model: ModelConfig, *, is_scorer: bool, filling: Filling) -> TransformersCritic:
    """Make a critic, or a reward model, of a directory, in host memory.

    Args:
        folder: Has ``config.json``, and the weights if they are read.
        model: The settings of the recipe.
        is_scorer: The directory has a value head; else its ``value_head.weight`` is undefined.
        filling: What fills its weights.

    Raises:
        ConfigError: ``transformers`` is not there, or has no such model; or its backbone or head is not found.
        CheckpointError: The weights are not the model's.
    """
    inner = _make(f"AutoModel{_SCORER}" if is_scorer else _CAUSAL, folder, model, filling)
    return wrap_critic(inner, model, is_scorer=is_scorer, where=str(folder))


def wrap_critic(inner: Any, model: ModelConfig, *, is_scorer: bool, where: str) -> TransformersCritic:
    """Return a model of ``transformers`` as a critic, or a reward model.

    Args:
        inner: A scorer, or a causal language model, whose backbone gets a head of undefined values.
        model: The settings of the recipe.
        is_scorer: Which of the two.
        where: What messages call it.

    Raises:
        ConfigError: Its backbone or head is not found, or it is not causal.
    """
    _check_causal(inner)
    prefix, name = inner.base_model_prefix, type(inner).__name__
    backbone: nn.Module | None = getattr(inner, prefix, None)
    if backbone is None:
        raise ConfigError(f"{where}: {name} has no backbone {prefix!r} to make a critic of; choose another model")
    heads = [each for each in inner.children() if isinstance(each, nn.Linear) and each is not backbone]
    if len(heads) != 1 or (is_scorer and (heads[0].out_features != 1 or "bias" in dict(heads[0].named_parameters()))):
        raise ConfigError(
            f"{where}: {name}: expected one linear head{' with one output and no bias' if is_scorer else ''}, found "
            f"{heads}; choose another model"
        )
    width = heads[0].in_features
    critic = TransformersCritic(backbone, prefix=prefix, hidden_size=width, max_context=model.max_context)
    if is_scorer:
        critic.value_head.weight = heads[0].weight
    return critic


def _check_causal(inner: Any) -> None:
    """Refuse a model in which later tokens, or padding, change what is computed for a token.

    Raises:
        ConfigError: A key of its ``config.json`` asks for it.
    """
    config = inner.config.get_text_config()
    names = _library("a model that runs in transformers").models.auto.modeling_auto
    found = {
        "is_causal": getattr(config, "is_causal", True) is False,
        "use_bidirectional_attention": getattr(config, "use_bidirectional_attention", None) in (True, "all"),
        # BERT and its kin. Others have this key too, and are causal whatever it says.
        "is_decoder": getattr(config, "is_decoder", True) is False
        and config.model_type in names.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    for key, is_asked in found.items():
        if is_asked:
            raise ConfigError(
                f"{type(inner).__name__}: {key}={getattr(config, key)}: a token would see those behind it; choose "
                "another model, or set the key in config.json if this one was trained to predict the next token"
            )


def copy_model(given: nn.Module, model: ModelConfig, *, filling: Filling) -> Any:
    """Return a copy of a module of ``transformers`` to train, in host memory and evaluation mode.

    Args:
        given: The module, which stays as it is.
        model: The settings of the recipe.
        filling: ``never``: the copy has no memory.
    """
    instead: dict[int, Any] = {}
    if filling == "never":
        instead = {id(each): torch.empty_like(each, device="meta") for each in given.buffers()}
        instead |= {id(each): nn.Parameter(torch.empty_like(each, device="meta")) for each in given.parameters()}
    made: Any = copy.deepcopy(given, instead).requires_grad_(True)
    _cast(made, model)
    if filling != "never":
        made.to("cpu")
    if hasattr(made, "generation_config"):
        # As of a directory: what it says of sampling is not what the recipe says.
        made.generation_config = type(made.generation_config)()
    return made.eval()


def _cast(module: nn.Module, model: ModelConfig) -> None:
    """Give all parameters one number format, which FSDP needs. Buffers, such as a router's bias, stay as exact.

    Where that bias is a parameter, as of ERNIE 4.5, it becomes a buffer: no gradient reaches it, and nothing decays it.

    Raises:
        ConfigError: A tensor that is saved has integers.
    """
    buffers = dict(module.named_buffers())
    for name in module.state_dict().keys() & buffers.keys():
        if buffers[name].dtype not in DTYPE_NAMES:
            raise ConfigError(
                f"{type(module).__name__}: its files hold {name}, of {buffers[name].dtype}; expected tensors of "
                f"{', '.join(map(str, DTYPE_NAMES))} alone: choose another model"
            )
    for each in module.modules():
        for name in [name for name in dict(each.named_parameters(recurse=False)) if name in ROUTER_BIASES]:
            bias = each.get_parameter(name).detach()
            delattr(each, name)
            each.register_buffer(name, bias)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(TORCH_DTYPES[model.dtype])


def is_scorer(given: object) -> bool:
    """Return whether a module of ``transformers`` gives a number for a sequence."""
    return any(base.__name__.endswith(_SCORER) for base in type(given).__mro__)


def _make(auto_class: str, folder: Path, model: ModelConfig, filling: Filling) -> Any:
    """Return a module of ``transformers``, in evaluation mode."""
    library = _library(f"{folder}: runs in transformers")
    bars = library.utils.logging
    has_bars = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    asked: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    found: Mapping[str, Any] = {}
    try:
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True, **asked)
        _say_what_is_tied(config, folder)
        asked["dtype"] = TORCH_DTYPES[model.dtype]
        auto = _whole(library, config) if auto_class == _CAUSAL else getattr(library, auto_class)
        if filling == "read":
            module, found = auto.from_pretrained(
                folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True, **asked
            )
        else:
            from transformers.initialization import no_init_weights

            with torch.device("meta") if filling == "never" else no_init_weights():
                module = auto.from_config(config, **asked)
            module.tie_weights()
    except Exception as error:  # of a malformed config.json, or in the directory's own code, that may be anything
        raise ConfigError(
            f"{folder}: transformers {library.__version__} cannot make the model: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:400]}; update transformers, restore the directory, or, if you trust its "
            "Python files, set trust_remote_code=true in the recipe's model section"
        ) from error
    finally:
        if has_bars:
            bars.enable_progress_bar()
    missing = sorted(found.get("missing_keys", ()))
    if missing:
        raise CheckpointError(
            f"{folder}: {missing[0]}: missing, one of {len(missing)} tensors that {type(module).__name__} has and the "
            "files have not; restore them from a copy"
        )
    extra = sorted(found.get("unexpected_keys", ()))
    if extra:
        raise CheckpointError(
            f"{folder}: {extra[0]}: is in the files, one of {len(extra)} tensors that {type(module).__name__} has not; "
            "mend config.json, for instance the number of layers, or remove these tensors from the files"
        )
    _check_tied(module, folder)
    # What a directory says of sampling is not what the recipe says.
    if hasattr(module, "generation_config"):
        module.generation_config = library.GenerationConfig()
    # transformers keeps some in fp32, such as routers of mixtures.
    _cast(module, model)
    return module.eval()


def make_vision_tower(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return the part of a vision-language model that computes images, in host memory, without its weights.

    Args:
        folder: Directory of the model.
        dtype: Of the weights.

    Raises:
        ConfigError: ``transformers`` is not there, or does not know the tower.
    """
    kind, config = _vision_tower(folder)
    with _made(f"{folder / CONFIG}: vision_config", "the vision tower"):
        tower: nn.Module = kind._from_config(config, dtype=dtype)
    return tower.requires_grad_(False).eval()


def make_image_processor(folder: Path) -> Any:
    """Return what makes the patches of images that a vision tower takes. Raises ConfigError: as make_vision_tower."""
    library = _library(f"{folder}: images are read in transformers")
    with _made(str(folder / PROCESSORS[0]), "the image processor"):
        # The other backend needs torchvision, and rounds in another way.
        return library.AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)


def check_image_reading(folder: Path) -> None:
    """Refuse a vision-language model whose images ``transformers`` cannot compute here.

    Raises:
        ConfigError: As ``make_vision_tower``.
    """
    make_image_processor(folder)
    _vision_tower(folder)


def _vision_tower(folder: Path) -> tuple[Any, Any]:
    """Return the class of a directory's vision tower, and its settings."""
    library = _library(f"{folder}: images are computed in transformers")
    with _made(f"{folder / CONFIG}: vision_config", "the vision tower"):
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
        # Not every release knows a tower by itself.
        with torch.device("meta"):
            whole = library.AutoModelForImageTextToText.from_config(config)
        return type(whole.model.visual), config.vision_config


@contextlib.contextmanager
def _made(where: str, what: str) -> Iterator[None]:
    """Raise what a malformed file leads to, which may be anything, as ConfigError."""
    try:
        yield
    except Exception as error:
        library = _library(where)
        raise ConfigError(
            f"{where}: transformers {library.__version__} cannot make {what}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:400]}; update transformers, or restore the file"
        ) from error


def _say_what_is_tied(config: Any, folder: Path) -> None:
    """Say of a vision-language model whether its embeddings are tied, where its ``config.json`` does not.

    For Mistral Small 3.1 ``transformers`` takes them to be tied, and finds by the weights that they are not. A rank
    that reads none would have another model.
    """
    values = read_json(folder / CONFIG)
    if "tie_word_embeddings" in values or vision_model(values) is None:
        return
    with contextlib.suppress(CheckpointError):
        if not any(name.endswith("lm_head.weight") for name in read_shapes(folder)):
            return
    config.tie_word_embeddings = language_model(values)["tie_word_embeddings"]


def _check_tied(module: Any, folder: Path) -> None:
    """Refuse an output layer of its own where the embeddings are tied: ranks that read no weights have none.

    Raises:
        CheckpointError: The files have one.
    """
    head = module.get_output_embeddings()
    is_told = getattr(module.config, "tie_word_embeddings", False) and getattr(module, "_tied_weights_keys", None)
    if is_told and head is not None and head.weight is not module.get_input_embeddings().weight:
        raise CheckpointError(
            f"{folder}: the output layer is not equal to the embedding, though {CONFIG} says tie_word_embeddings=true; "
            "set it to false to keep both, or remove the tensor"
        )


def _whole(library: Any, config: Any) -> Any:
    """Return the class of ``transformers`` that makes a causal language model with its vision tower.

    ``AutoModelForCausalLM`` leaves the tower out for some types, whose files then have other names, and has no model
    for others. Llama 4 with them cannot compute text alone.
    """
    names = library.models.auto.modeling_auto
    with_vision = names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    is_whole = with_vision is not None and with_vision in (config.architectures or ()) and config.model_type != "llama4"
    return library.AutoModelForImageTextToText if is_whole else getattr(library, _CAUSAL)


def _library(what: str) -> Any:
    """Return ``transformers``, imported where it is needed alone.

    Raises:
        ConfigError: It cannot be imported.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"{what}, which cannot be imported: {error}; pip install transformers") from error
    return transformers


@torch.no_grad()
def generate(
    actor: TransformersActor,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    max_new_tokens: int,
    pad_id: int,
    choose: Callable[[Tensor], Tensor],
    is_over: Callable[[], bool],
) -> None:
    """Run the model token by token with a key-value cache; the caller chooses the tokens.

    Args:
        actor: The model.
        input_ids: ``[samples, tokens]`` int64, with padding before shorter samples if the model ``takes_padding``.
        attention_mask: ``[samples, tokens]`` int64: 1, and 0 on padding.
        max_new_tokens: Most tokens that are asked for.
        pad_id: Token of padding.
        choose: Gets logits of the next tokens, ``[samples, vocab]`` fp32; returns these, ``[samples]`` int64.
        is_over: Asked after each token; whether to end.

    Raises:
        ConfigError: ``transformers`` cannot be imported.
    """
    library = _library("sampling needs transformers")

    class Choose(library.LogitsProcessor):  # type: ignore[name-defined]
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full_like(scores, -torch.inf).scatter_(1, choose(scores)[:, None], 0.0)

    class Stop(library.StoppingCriteria):  # type: ignore[name-defined]
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.full((len(input_ids),), is_over(), device=input_ids.device)

    actor.inner.generate(
        input_ids,
        attention_mask=attention_mask,
        generation_config=library.GenerationConfig(
            # The likeliest of scores that leave one token each.
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_id,
            use_cache=True,
        ),
        logits_processor=library.LogitsProcessorList([Choose()]),
        stopping_criteria=library.StoppingCriteriaList([Stop()]),
    )


def can_generate(actor: TransformersActor) -> bool:
    """Return whether ``generate`` gives what the model computes: not every class with code of its own has it."""
    return actor.inner.config.model_type not in _UNCACHED and bool(
        getattr(actor.inner, "can_generate", lambda: False)()
    )


def takes_padding(actor: TransformersActor) -> bool:
    """Return whether padding before a sample, which a mask tells of, changes nothing in ``generate``."""
    return actor.inner.config.model_type not in _UNPADDED


def scorer_of(model_type: str) -> str | None:
    """Return the ``*ForSequenceClassification`` of ``transformers`` for a type of model; None: there is none.

    Raises:
        ConfigError: ``transformers`` cannot be imported.
    """
    auto = _library("writing a model that runs in transformers needs transformers").models.auto.modeling_auto
    found: str | None = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
    return found


def names_as_saved(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors as in a saved directory: transformers 5 keeps the experts of a layer in one tensor in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(state)))


def renaming(values: Mapping[str, Any]) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Return ``names_as_saved`` for the model of a parsed ``config.json``, which is made without memory.

    A number of no dims, which our checkpoints hold as a list of one, has none again. A model whose code came with its
    directory keeps its names and lists: that code does not run here.

    Raises:
        ConfigError: ``transformers`` cannot be imported, or cannot make the model.
    """
    library = _library("writing a model that runs in transformers needs transformers")
    names, kind = library.models.auto.modeling_auto, values.get("model_type")
    known_kinds = {*names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if kind not in known_kinds:
        return dict
    known = {key: value for key, value in values.items() if key != "auto_map"}
    try:
        # From a file, since transformers writes some numbers in a form that it understands there alone.
        with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
            (Path(folder) / CONFIG).write_bytes(to_json(known))
            config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
            module = _whole(library, config).from_config(config)
    except Exception as error:  # see _make
        raise ConfigError(
            f"model_type={values['model_type']!r}: transformers {library.__version__} cannot make the model, which "
            f"tells the names in its files: {type(error).__name__}: {' '.join(str(error).split())[:400]}; write it "
            "with the version that it was trained with"
        ) from error
    numbers = {name for name, each in module.state_dict().items() if each.dim() == 0}

    def rename(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return names_as_saved(
            module, {name: each.view(()) if name in numbers else each for name, each in state.items()}
        )

    return rename

"""Actors, critics and rewards of a user's own: what such a class has to have, and how one is trained as it is.

A class of one's own is a plain ``torch.nn.Module``. Every rank of its mesh holds it whole, so it is data parallel
alone; ``hybridflow.testing`` checks that it keeps to what is said here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.errors import ConfigError
from hybridflow.families.model import ModelConfig
from hybridflow.families.model_info import ModelInfo
from hybridflow.reshard.spec import ModelSpec, TensorSpec
from hybridflow.reshard.views import DTYPE_NAMES

FAMILY = "own"
"""In the place of a family of Hugging Face, in what is saved of a class of one's own."""


class ActorModel(nn.Module):
    """A policy of one's own: subclass it, or have the same attributes and methods.

    ``ActorModel(model)`` is ``model`` itself.

    Attributes:
        vocab_size: Token ids that it knows.
        max_context: Longest sequence, prompt and response, in tokens.
        generate: None: responses are sampled by calls of ``forward``. A method of one's own is used instead:
            ``generate(input_ids, attention_mask, *, max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id,
            pad_token_id)``, as ``transformers`` has it. ``input_ids`` are ``[samples, tokens]`` int64 with padding
            before shorter prompts, where ``attention_mask`` is 0; ``top_k=0`` and ``top_p=1`` cut nothing;
            ``eos_token_id`` is a list. It returns ``[samples, tokens + new]``, prompts included, what follows an end of
            sequence being padding; or a pair of that and the log-probabilities of the new tokens, ``[samples, new]``
            under ``softmax(logits / temperature)``. Called with torch's generators seeded for the batch.
    """

    vocab_size: int
    max_context: int
    generate: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the model that ``ActorModel(model)`` was called with: trainers take it as it is."""
        return given_model(*args, **kwargs) if cls is ActorModel and (args or kwargs) else super().__new__(cls)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits of the next token at each place.

        Args:
            input_ids: ``[samples, tokens]`` int64. Shorter sequences end in padding, whose ids mean nothing: what
                stands behind a token must not change what is computed for it.

        Returns:
            ``[samples, tokens, vocab]``, any floating type, ``vocab`` being ``vocab_size`` or more (padding).
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward(input_ids)")


class CriticModel(nn.Module):
    """A value model of one's own: subclass it, or have the same attributes and methods.

    ``CriticModel(model)`` is ``model`` itself.

    Attributes:
        max_context: Longest sequence, prompt and response, in tokens.
    """

    max_context: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the model that ``CriticModel(model)`` was called with: trainers take it as it is."""
        return given_model(*args, **kwargs) if cls is CriticModel and (args or kwargs) else super().__new__(cls)

    def values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the value of the state after each token; later tokens must not change it.

        Args:
            input_ids: ``[samples, tokens]`` int64; shorter sequences end in padding.
            attention_mask: ``[samples, tokens]`` int64: 1, and 0 on padding.

        Returns:
            ``[samples, tokens]``, any floating type.
        """
        raise NotImplementedError(f"{type(self).__name__} has no values(input_ids, attention_mask)")


class RewardModel:
    """A reward of one's own: subclass it, or have the same method. It is not trained."""

    def scores(self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> Sequence[float]:
        """Return one finite number for each response; called with any number of samples in any order.

        Args:
            prompts: Texts of the prompts.
            responses: Texts of the responses.
            answers: What the data call the right answer of each problem.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scores(prompts, responses, answers)")


def given_model(model: Any) -> Any:
    """Return a model that ``ActorModel`` or ``CriticModel`` was called with.

    Raises:
        ConfigError: It is no module, or it is such a model already.
    """
    if isinstance(model, nn.Module) and not isinstance(model, ActorModel | CriticModel):
        return model
    raise ConfigError(
        f"ActorModel, CriticModel: called with {type(model).__name__}, expected a model of transformers, a GPTModel of "
        "megatron-core or another torch.nn.Module; give directories, and objects of subclasses, to the trainer as they "
        "are"
    )


def is_user_class(given: object) -> bool:
    """Return whether an object is a user's own class that can be trained: an actor, or a critic."""
    return isinstance(given, nn.Module) and (isinstance(given, ActorModel | CriticModel) or not _is_library(given))


def _is_library(given: nn.Module) -> bool:
    """Return whether a known library defines what the module computes, so that it can be cut."""
    libraries = ("transformers", "megatron", "peft")
    return any(base.__module__.partition(".")[0] in libraries for base in type(given).__mro__)


def user_model_info(given: object) -> ModelInfo | None:
    """Return what a user's own class says about itself; None: the object is none.

    Of the settings only ``vocab_size``, ``max_context`` and ``dtype`` mean anything.

    Raises:
        ConfigError: It does not say how long its sequences are, or has nothing to be trained.
    """
    if not is_user_class(given):
        return None
    assert isinstance(given, nn.Module), "is_user_class says so"
    name, is_critic = type(given).__name__, callable(getattr(given, "values", None))
    for key in ("max_context",) if is_critic else ("max_context", "vocab_size"):
        value = getattr(given, key, None)
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{name}.{key}: found {value!r}, expected an integer of at least 1; set it in __init__ (docs/extend.md)"
            )
    dtypes = {parameter.dtype for parameter in given.parameters()}
    if not dtypes or not dtypes <= DTYPE_NAMES.keys():
        found = ", ".join(sorted(map(str, dtypes))) or "no parameters"
        raise ConfigError(f"{name}: found {found}, expected parameters of {', '.join(map(str, DTYPE_NAMES))}")
    model = ModelConfig(
        num_layers=1,
        hidden_size=2,
        ffn_hidden_size=1,
        num_attention_heads=1,
        max_context=getattr(given, "max_context"),  # noqa: B009
        vocab_size=getattr(given, "vocab_size", None),
        dtype="fp32" if torch.float32 in dtypes else "bf16",
    )
    return ModelInfo(model, is_critic, FAMILY, None, is_cut=False)


def ask_logits(module: nn.Module, input_ids: Tensor, *, vocab_size: int, name: str) -> Tensor:
    """Return the result of an actor's ``forward``, ``[samples, tokens, vocab]``.

    Args:
        module: The actor.
        input_ids: ``[samples, tokens]`` int64.
        vocab_size: Token ids that are chosen among.
        name: What messages call the module.

    Raises:
        ConfigError: It is of another shape, or no tensor.
    """
    found = module(input_ids)
    if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[:2] != input_ids.shape:
        wanted = [*input_ids.shape, vocab_size]
        raise ConfigError(
            f"{name}.forward gave {said(found)}, expected [samples, tokens, vocab] = {wanted}: the logits"
        )
    if found.shape[2] < vocab_size:
        raise ConfigError(f"{name}.forward gave logits of {found.shape[2]} tokens, expected vocab_size={vocab_size}")
    return found


def ask_values(module: nn.Module, input_ids: Tensor, attention_mask: Tensor, *, name: str) -> Tensor:
    """Return the result of a critic's ``values``, ``[samples, tokens]``; arguments as in ``CriticModel.values``.

    Raises:
        ConfigError: It is of another shape, or no tensor.
    """
    found = module.values(input_ids, attention_mask)  # type: ignore[operator]
    if not isinstance(found, Tensor) or found.shape != input_ids.shape:
        wanted = [*input_ids.shape]
        raise ConfigError(
            f"{name}.values gave {said(found)}, expected [samples, tokens] = {wanted}: one for each token"
        )
    return found


def said(found: object) -> str:
    """Describe an object in words."""
    return f"a tensor of shape {[*found.shape]}" if isinstance(found, Tensor) else type(found).__name__


class Uncut(nn.Module):
    """A model that no layout cuts, in the place of megatron-core's: every rank of its mesh holds all of it.

    Args:
        module: The user's.

    Raises:
        ConfigError: A tensor of it is of a kind that cannot be saved.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for name, tensor in self.tensors():
            if tensor.dtype not in DTYPE_NAMES or tensor.numel() == 0 or not tensor.is_contiguous():
                raise ConfigError(
                    f"{type(module).__name__}.{name}: {tensor.dtype} of shape {list(tensor.shape)}; expected a "
                    "contiguous tensor of floating numbers that is not empty: a buffer that need not be saved is "
                    "registered with persistent=False"
                )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters, then buffers that are saved with them, by the module's names; shared ones once."""
        yield from self.module.named_parameters()
        saved = self.module.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.module.named_buffers() if name in saved)

    def describe(self) -> ModelSpec:
        """Describe how the tensors are cut: not at all."""
        tensors = tuple(
            TensorSpec(
                name=name,
                # A number of no dims is saved as a list of one.
                shape=tuple(tensor.shape) or (1,),
                dtype=DTYPE_NAMES[tensor.dtype],
                tp_dim=None,
                place="embedding",
            )
            for name, tensor in self.tensors()
        )
        return ModelSpec(tensors=tensors, num_layers=1)

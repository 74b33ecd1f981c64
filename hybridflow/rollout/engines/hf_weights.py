"""Live weights under the names and in the forms that ``transformers`` and vLLM know: no files, no megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from hybridflow.checkpoint.formats.huggingface import parts_of
from hybridflow.families.config_json import Described


def hf_weights(described: Described, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a model, one logical tensor's parts at a time; views where the form allows.

    Args:
        described: The model, and the table of its family.
        read: From a logical name to the whole tensor without padding.

    Raises:
        ConfigError: The family has no place for a tensor of the model.
    """
    for name, parts in parts_of(described).items():
        # Of experts that share tensors the first gives those of all.
        if not parts.expert:
            yield from zip(parts.names, parts.from_logical(read, name, described.model), strict=True)

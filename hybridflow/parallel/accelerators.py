"""The one door to Transformer Engine and Apex: whether they can be used, and torch's own kernels in their place.

megatron-core takes the optimizer of whichever package is installed, and both packages' kernels run on GPUs only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from typing import Any

import torch

FIRST_TRANSFORMER_ENGINE, PAST_TRANSFORMER_ENGINE = (2, 9), (2, 12)
"""The releases of Transformer Engine that megatron-core 0.16.1 is written against; setup.py has them too."""


@functools.cache
def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be used: there is a GPU, and the package has no fault."""
    return torch.cuda.is_available() and not transformer_engine_fault()


def transformer_engine_fault() -> str:
    """Return why Transformer Engine cannot be used, in words; empty if it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "it is not installed"
    found = misfit(importlib.metadata.version("transformer-engine"))
    if found:
        return found
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a package that was built for another torch raises whatever it likes
        return f"it cannot be imported: {type(error).__name__}: {error}"
    return ""


def misfit(version: str) -> str:
    """Return why megatron-core is not written against this release of Transformer Engine; empty if it is."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and FIRST_TRANSFORMER_ENGINE <= (int(found[1]), int(found[2])) < PAST_TRANSFORMER_ENGINE:
        return ""
    first, past = (".".join(map(str, each)) for each in (FIRST_TRANSFORMER_ENGINE, PAST_TRANSFORMER_ENGINE))
    return f"megatron-core needs >={first},<{past}"


def use_torch_optimizer() -> None:
    """Make megatron-core step with torch's AdamW and clip with torch's operators, whichever packages are installed."""
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    clipping: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    mixed: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    utils: Any = importlib.import_module("megatron.core.utils")
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    clipping.l2_norm_impl = utils.local_multi_tensor_l2_norm
    for module in (clipping, mixed):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale

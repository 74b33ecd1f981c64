"""Runs in a process of its own: imports what may crash, and writes what it found line by line as JSON.

python -m hybridflow.doctor.probe torch megatron transformer_engine mpi
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from typing import Any


def main(parts: list[str]) -> None:
    """Look at each part in turn."""
    for part in parts:
        if part == "torch":
            _torch()
        elif part == "megatron":
            _try("megatron", lambda: _version("megatron.core", "megatron-core"))
        elif part == "kernels":
            _try("kernels", _kernels)
        elif part == "mpi":
            _mpi()
        else:
            _optional(part)


def _tell(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def _try(name: str, look: Any) -> bool:
    try:
        _tell(**{name: look()})
    except Exception as error:  # a broken package raises whatever it likes
        _tell(**{f"{name}_error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]})
        return False
    return True


def _version(module: str, distribution: str) -> str:
    importlib.import_module(module)
    return importlib.metadata.version(distribution)


def _kernels() -> str:
    """Return why the compiled kernels are not used; empty if they are."""
    found = importlib.import_module("hybridflow.rollout.cpu.kernels").find_kernels()
    return found if isinstance(found, str) else ""


def _optional(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        _tell(**{module: "absent"})
        return
    _tell(**{module: "installed"})  # stands if the import crashes
    if module == "apex":
        _tell(apex_is_nvidia=importlib.util.find_spec("apex.optimizers") is not None)
    if module == "transformer_engine":
        accelerators = importlib.import_module("hybridflow.parallel.accelerators")
        _try("transformer_engine_misfit", accelerators.transformer_engine_misfit)
    _try(module, lambda: str(getattr(importlib.import_module(module), "__version__", "installed")))


def _torch() -> None:
    try:
        import torch
    except Exception as error:
        _tell(torch_error=f"{type(error).__name__}: {error}"[:300])
        return
    _tell(torch=torch.__version__, cuda=torch.version.cuda, hip=getattr(torch.version, "hip", None))
    if torch.version.cuda or getattr(torch.version, "hip", None):
        start: Any = torch.cuda.init
        nccl: Any = torch.cuda.nccl
        _try("nccl", lambda: ".".join(map(str, nccl.version())))
        _try("gpu", lambda: start() or "answers")
        if torch.cuda.is_available():
            _tell(gpus=[_gpu(torch, index) for index in range(torch.cuda.device_count())])


def _gpu(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    found = {
        "index": index,
        "name": properties.name,
        "memory_gib": properties.total_memory / 2**30,
        "capability": f"{properties.major}{properties.minor}",
    }
    try:
        ones = torch.ones(64, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        assert float((ones @ ones).sum()) == 64**3
        choose = importlib.import_module("hybridflow.models.cuda_attention").backend
        found["attention"] = choose(torch.bfloat16, 128, (properties.major, properties.minor))
    except Exception as error:
        found["error"] = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return found


def _mpi() -> None:
    # The import of mpi4py stands in one module alone.
    if importlib.util.find_spec("mpi4py") is None:
        _tell(mpi="absent")
        return
    from hybridflow.parallel import mpi

    if _try("mpi", mpi.library_version):
        _try("mpi_reads_gpu", mpi.reads_gpu_memory)


if __name__ == "__main__":
    main(sys.argv[1:])

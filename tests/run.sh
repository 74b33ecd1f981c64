#!/usr/bin/env bash
# Makes .venv, installs what the tests need, and runs them. Quick the second time.
#   tests/run.sh [--all] [pytest arguments]      for instance: tests/run.sh tests/unit -k layout
#   --all: with the tests marked slow, slurm, vllm and cuda_build; installs what these need: packages of the system (Slurm,
#          bubblewrap, a Pushgateway, Chromium, Java, npm), Kafka into .kafka, vLLM into .venv-vllm, and torch's CUDA build into .venv-cuda,
#          environments of some GB
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
marks="not slow and not slurm and not vllm and not cuda_build"
support=$root/tests/support

install() { "$@" || echo "${1##*/} ${*:2}: failed, see above; the tests that need it are skipped" >&2; }

if [ "${1:-}" = --all ]; then
    marks=""
    shift
fi
"$root/launch/venv.sh" dev
if [ -z "$marks" ]; then
    install "$support/slurm.sh"
    install "$support/apt.sh" prometheus-pushgateway=prometheus-pushgateway bwrap=bubblewrap chromium=chromium
    install "$support/kafka.sh"
    install "$support/vllm.sh"
    install "$support/cuda.sh"
fi
cd "$root"
export PATH="$root/.venv/bin:$PATH"
# Two processes, a file each at a time, the longest files first. Later arguments win: with -n 0 there is one process.
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "$marks" "$@"

#!/usr/bin/env bash
# Makes .venv, installs what the tests need, and runs them. Quick the second time.
#   tests/run.sh [--all | --long] [pytest arguments]      for instance: tests/run.sh tests/unit -k layout
#   --all: with the tests marked slow, slurm, vllm and cuda_build; installs what these need: packages of the system (Slurm,
#          bubblewrap, a Pushgateway, Chromium, Java, npm), Kafka into .kafka, vLLM into .venv-vllm, and torch's CUDA build into .venv-cuda,
#          environments of some GB
#   --long: as --all, and with the tests marked long, which take minutes each: every case of what --all tries some cases of
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
marks="not slow and not slurm and not vllm and not cuda_build and not long"
support=$root/tests/support

install() { "$@" || echo "${1##*/} ${*:2}: failed, see above; the tests that need it are skipped" >&2; }

# On two cores a third process fills the time in which the others wait: for ranks, for a deadline, for Slurm.
is_whole="" processes=3
case "${1:-}" in
    --all) is_whole=yes marks="not long"; shift ;;
    --long) is_whole=yes marks=""; shift ;;
esac
"$root/launch/venv.sh" dev
if [ -n "$is_whole" ]; then
    # Environments of Python beside packages of the system, since each takes minutes.
    install "$support/vllm.sh" &
    install "$support/cuda.sh" &
    install "$support/slurm.sh"
    install "$support/apt.sh" prometheus-pushgateway=prometheus-pushgateway bwrap=bubblewrap chromium=chromium
    install "$support/kafka.sh"
    wait
fi
cd "$root"
export PATH="$root/.venv/bin:$PATH"
# Bytecode is kept, also where the user's shell asks for none: without it each process of pytest takes 7 s more to read
# the tests, and programs that they start read the package anew.
export PYTHONDONTWRITEBYTECODE=
# A file each at a time, the longest files first. Later arguments win: with -n 0 there is one process.
exec python -m pytest -n "$processes" --dist loadfile --no-loadscope-reorder -m "$marks" "$@"

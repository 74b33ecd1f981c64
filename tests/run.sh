#!/usr/bin/env bash
# Makes .venv, installs with what the tests need, and runs them. Quick the second time.
#   tests/run.sh [--all] [pytest arguments]      --all: with the tests marked slow, slurm and vllm
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
marks="not slow and not slurm and not vllm"
if [ "${1:-}" = --all ]; then
    marks=""
    shift
fi
"$root/launch/venv.sh" dev
cd "$root"
export PATH="$root/.venv/bin:$PATH"
exec python -m pytest -m "$marks" "$@"

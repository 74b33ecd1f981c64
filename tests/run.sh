#!/usr/bin/env bash
# Makes .venv, installs what the tests need, Slurm, a Pushgateway, bubblewrap and Kafka among it where it can, and runs them. Quick the second time.
#   tests/run.sh [--all] [pytest arguments]      --all: with the tests marked slow, slurm and vllm, the last of which get
#                                                .venv-vllm, an environment of some GB
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
marks="not slow and not slurm and not vllm"
if [ "${1:-}" = --all ]; then
    marks=""
    shift
fi
"$root/launch/venv.sh" dev
"$root/tests/support/slurm.sh" || echo "Slurm could not be installed, see above: the tests that need it are skipped" >&2
"$root/tests/support/apt.sh" prometheus-pushgateway=prometheus-pushgateway ||
    echo "prometheus-pushgateway could not be installed, see above: its test is skipped" >&2
"$root/tests/support/apt.sh" bwrap=bubblewrap ||
    echo "bubblewrap could not be installed, see above: the tests of the sandbox run without it" >&2
"$root/tests/support/kafka.sh" || echo "Kafka could not be installed, see above: the tests that need it are skipped" >&2
if [ -z "$marks" ]; then
    "$root/tests/support/vllm.sh" || echo "vLLM could not be installed, see above: the tests that need it are skipped" >&2
fi
cd "$root"
export PATH="$root/.venv/bin:$PATH"
exec python -m pytest -m "$marks" "$@"

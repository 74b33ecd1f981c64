#!/usr/bin/env bash
# From a clone to a trained model: makes .venv, installs, trains launch/recipes/quickstart.yaml. Quick the second time.
#   launch/quickstart.sh [key=value ...]      for instance: launch/quickstart.sh trainer.steps=10
# An interrupted run goes on where it was saved, a finished one is judged again; remove runs/quickstart to begin anew.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/venv.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH"
status=0
hybridflow train quickstart --resume "$@" || status=$?
printf 'The command hybridflow is in .venv. In a new shell:\n    source %q\n' "$root/.venv/bin/activate"
exit $status

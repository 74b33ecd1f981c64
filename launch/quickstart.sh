#!/usr/bin/env bash
# From a clone to a trained model: makes .venv, installs, trains launch/recipes/quickstart.yaml. Quick the second time:
# what is installed stays, and a run that was cut short goes on from its last checkpoint.
#   launch/quickstart.sh [key=value ...]      for instance: launch/quickstart.sh trainer.steps=10
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/venv.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH"
exec hybridflow train quickstart --resume "$@"

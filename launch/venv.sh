#!/usr/bin/env bash
# Makes the virtual environment .venv of this clone and installs the package into it, unless that is done already.
#   launch/venv.sh [EXTRAS]      for instance: launch/venv.sh dev
# PYTHON names the interpreter to make it with; left out, the first suitable one is taken.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extras=${1:-}
venv=$root/.venv
# What was installed holds as long as these files and the place of the clone stay as they are.
mark="$(cat "$root/setup.py" "$root"/hybridflow/rollout/cpu/*.[ch] | cksum) $root"
installed=$venv/.installed
candidates=(python3 python3.13 python3.12 python3.11 python3.10)
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")

suits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2> /dev/null; }

if [ -f "$installed" ] && grep -qxF -e "$mark [$extras]" -e "$mark [dev]" "$installed"; then
    exit 0
fi

make_venv() {
    "$1" -m venv "$venv" && return
    rm -rf "$venv"
    # Debian keeps venv apart from Python.
    command -v apt-get > /dev/null && [ "$(id -u)" = 0 ] || return 1
    apt-get update -q && apt-get install -qy python3-venv && "$1" -m venv "$venv"
}

if [ ! -x "$venv/bin/python" ]; then
    for python in "${candidates[@]}"; do
        if suits "$python"; then
            make_venv "$python" || { rm -rf "$venv"; exit 2; }
            break
        fi
    done
fi
if ! suits "$venv/bin/python"; then
    echo "error: ${PYTHON:-python3} is not Python 3.10 to 3.13; install one and set PYTHON, for instance PYTHON=python3.12" \
        "(and remove $venv if it is there)" >&2
    exit 2
fi

# torch first, and pinned: with no version, pip may choose a build of several GB that matches nothing else here.
"$venv/bin/python" -m pip install --disable-pip-version-check torch==2.13.0
"$venv/bin/python" -m pip install --disable-pip-version-check --editable "$root${extras:+[$extras]}"
echo "$mark [$extras]" >> "$installed"

#!/usr/bin/env bash
# Installs Debian's packages of programs that are not there.
#   tests/support/apt.sh PROGRAM=PACKAGE …      for instance: tests/support/apt.sh munged=munge prometheus-pushgateway=prometheus-pushgateway
set -euo pipefail

packages=()
PATH=$PATH:/usr/sbin:/sbin
for each in "$@"; do
    command -v "${each%=*}" > /dev/null || packages+=("${each#*=}")
done
if [ ${#packages[@]} = 0 ]; then
    exit 0
fi
if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then
    echo "packages are missing, and only root can install them, on Debian or its kin: ${packages[*]}" >&2
    exit 1
fi
# A package's own script would start its daemon, which nobody asked for; one that forbids it already is left alone.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' > $policy
    chmod +x $policy
fi
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install -qy --no-install-recommends "${packages[@]}")
"${install[@]}" || { apt-get update -q && "${install[@]}"; }

#!/usr/bin/env bash
# Installs Slurm and munge from Debian's packages for the tests on a throw-away cluster, unless they are there already:
# what tests/support/slurm_cluster.py starts.
exec "$(dirname "${BASH_SOURCE[0]}")/apt.sh" \
    munged=munge slurmctld=slurmctld slurmd=slurmd sbatch=slurm-client ip=iproute2 setpriv=util-linux

"""Resharding over MPI, in a job that mpirun started: ``mpirun -n 4 python -m tests.multi.test_reshard_mpi``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from hybridflow.parallel.rendezvous import open_store
from hybridflow.parallel.start import find_start
from hybridflow.parallel.world import join_world
from hybridflow.reshard import execute, transport
from tests.e2e.commands import run_command
from tests.multi.test_reshard import PAIRS, shrink_messages, there_and_back

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
NUM_RANKS = 4


@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun beside python or in PATH")
def test_every_pair_over_mpi():
    program = [MPIRUN, "-n", str(NUM_RANKS), sys.executable, "-m", "tests.multi.test_reshard_mpi"]
    done = run_command([], Path(__file__).parents[2], program=program, within_s=240)
    assert done.codes == (0,), done.out + done.err
    assert done.out.count("bit-exact over MPI") == NUM_RANKS


def main() -> None:
    """One rank."""
    start = find_start()
    world = join_world(start, open_store(start, start_deadline_s=60), deadline_s=60, start_deadline_s=60)
    prepared = []

    class Counted(transport.MpiTransport):
        def prepare(self, *legs):
            prepared.append(legs)
            return super().prepare(*legs)

    execute.MpiTransport = Counted
    for name in ("mpi", "auto"):
        # Under "auto" only pairs of ranks on two nodes have messages.
        world.ranks_per_node = NUM_RANKS if name == "mpi" else 2
        prepared.clear()
        there_and_back(world, PAIRS[NUM_RANKS], name)
        assert prepared
    shrink_messages()
    there_and_back(world, PAIRS[NUM_RANKS], "mpi")
    assert {leg.is_fixed for legs in prepared for leg in legs if leg is not None} == {False, True}
    print("bit-exact over MPI", flush=True)
    world.close()


if __name__ == "__main__":
    main()

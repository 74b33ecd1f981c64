"""One cluster and one tiny checkpoint for all tests on a real Slurm."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.jobs import train_first_step
from tests.support.slurm_cluster import SlurmCluster, missing_programs


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[SlurmCluster]:
    """Four nodes; partitions low, the default, and high, which preempts it."""
    if missing := missing_programs():
        pytest.skip(
            f"no Slurm here, {', '.join(missing)} not found: tests/support/slurm.sh installs it on Debian, as root"
        )
    with SlurmCluster(num_nodes=4) as cluster:
        yield cluster


@pytest.fixture
def cluster(session_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, with all nodes up and no job."""
    yield session_cluster
    try:
        session_cluster.restore()
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as problem:
        # One test's ruins are not the next one's: each would wait for them anew.
        warnings.warn(f"the cluster could not be restored and is made anew: {problem}", stacklevel=1)
        session_cluster.stop()
        session_cluster.start()


@pytest.fixture(scope="session")
def first_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``tiny.yaml``, its data and its run after step 1; for reading."""
    folder = tmp_path_factory.mktemp("first-step")
    train_first_step(folder)
    return folder


@pytest.fixture
def folder(first_step: Path, tmp_path: Path) -> Path:
    """A test's own copy of it: where jobs are submitted, and go on from step 1 with ``--resume``."""
    return Path(shutil.copytree(first_step, tmp_path / "job"))

"""Settings of the whole suite."""

import contextlib
import gc
import os
import time

import pytest
from hypothesis import settings

from tests.support.http_server import Server
from tests.support.kafka_broker import is_there, running_broker

# Until all test files are imported, a quarter of which it would take; see pytest_collection_finish.
gc.disable()

# Ranks share few cores; also read by what the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Also where there are GPUs. So it is no oversight that recipes for GPUs run on the CPU, and no run warns of it.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# So that no test makes a key in the home of who runs it; see parallel/secret.py.
os.environ.setdefault("HYBRIDFLOW_SECRET", "known to the ranks of a test")
# As the command does; torch reads it when it is imported, which ranks that are forked from here do not do.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

# No deadline for an example: machines are shared, and a slow one is not a wrong one.
settings.register_profile("hybridflow", deadline=None, derandomize=True)
settings.load_profile("hybridflow")

# Seconds from which on a test is named as it ends, so that a run that is cut off tells where its time went.
LONG_S = 60.0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each file to one process, for its fixtures, and all of tests/slurm to one, for its cluster.

    Tests of the GPU path are processes of minutes of their own, which may run beside each other.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            if nodeid.startswith("tests/e2e/test_cuda_build.py"):
                return nodeid
            return "tests/slurm" if nodeid.startswith("tests/slurm/") else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    """Begin with Slurm's tests, which one process has and which wait much: the other processes use the cores then."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/slurm/"))


def pytest_collection_finish():
    """Keep what has been imported from the collector, and let it look seldom at the rest, which is little."""
    # Not collected first, which takes 1.6 s: a twenty-fifth of what is there could be freed.
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Name long tests where there is a terminal, which the processes that run the tests do not have."""
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(LongTests(terminal))


class LongTests:
    """Writes a line for each test, or set-up of a fixture, that took long."""

    def __init__(self, terminal):
        self.terminal = terminal
        self.begun = time.monotonic()

    def pytest_runtest_logreport(self, report):
        if report.duration >= LONG_S:
            after = (time.monotonic() - self.begun) / 60
            words = f"{after:.1f} min: {report.nodeid} ({report.when}) took {report.duration:.0f} s"
            self.terminal.write(f"\n{words}\n")


@pytest.fixture
def serve():
    """Starts servers on loopback."""
    with contextlib.ExitStack() as servers:
        yield lambda answer, **settings: servers.enter_context(contextlib.closing(Server(answer, **settings)))


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A Kafka broker, for the tests of one module."""
    pytest.importorskip("confluent_kafka")
    if not is_there():
        pytest.skip("needs Kafka in .kafka, and java: tests/support/kafka.sh installs them")
    with running_broker(tmp_path_factory.mktemp("kafka")) as found:
        yield found

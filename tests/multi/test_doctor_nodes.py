"""``hybridflow doctor --nodes`` on ranks that stand for nodes: one is slow, hangs, does not come, or differs."""

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest

from hybridflow.doctor import across, command, compare, measure
from hybridflow.doctor.finding import Finding
from tests.e2e.commands import fork_ranks

SHORT = across.Deadlines(start_s=15.0, report_s=25.0, message_s=5.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Small measurements, and a single check of each machine; the ranks that are forked inherit it."""
    monkeypatch.setattr(measure, "_MEASURE_S", 0.3)
    monkeypatch.setattr(measure, "_CPU_SIZE", 128)
    monkeypatch.setattr(measure, "_CPU_COPY_BYTES", 2**20)
    monkeypatch.setattr(measure, "_MESSAGE_BYTES", 2**16)
    monkeypatch.setattr(measure, "use_all_cores", lambda: None)
    # Ranks that share a few cores get unequal parts of them: their own time is counted, and a message's not at all.
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=time.process_time, monotonic=time.monotonic))
    monkeypatch.setattr(measure, "pair_bytes_per_s", with_speed(1e9))
    monkeypatch.setattr(compare, "SLOW", 0.3)
    machine = Finding(area="machine", name="cores", value="some")
    monkeypatch.setattr(command, "check_machine", lambda directory, of_many: [machine])
    monkeypatch.setattr(across, "Deadlines", lambda: SHORT)


def doctor(folder, num_nodes, hook=lambda rank: None, directory="run", **options):
    """Run it, and return the exit statuses and what rank 0 printed."""

    def named(rank):
        os.environ["SLURMD_NODENAME"] = f"n{rank}"
        hook(rank)

    (folder / "run").mkdir(exist_ok=True)
    done = fork_ranks(["doctor", "--nodes", "--json", directory], folder, num_ranks=num_nodes, hook=named, **options)
    return done, json.loads(done.out) if done.out else None


def problems(found):
    return {each["name"]: each for each in found["findings"] if each["verdict"] == "problem"}


def slowed(function, times):
    """The same measurement on a machine that takes so many times as long for each piece of work."""
    return lambda work, device: function(lambda: [work() for _ in range(times)], device)


def with_speed(bytes_per_s, speak=measure.pair_bytes_per_s):
    """Real messages between the ranks, and a speed that does not depend on who else uses this machine."""

    def run(peer, device):
        assert speak(peer, device) > 0
        return bytes_per_s

    return run


def test_equal_nodes_have_no_problem_and_leave_nothing_behind(tmp_path):
    done, found = doctor(tmp_path, 3)
    assert done.codes == (0, 0, 0), (done.err, found and problems(found))
    assert [each["host"] for each in found["nodes"]] == ["n0", "n1", "n2"] and not list((tmp_path / "run").iterdir())
    assert all(set(each["speeds"]) == {"matmul", "memory", "network", "disk"} for each in found["nodes"])
    assert sorted(pair["hosts"] for pair in found["pairs"]) == [["n0", "n1"], ["n0", "n2"], ["n1", "n2"]]
    assert all(pair["bytes_per_s"] > 0 for pair in found["pairs"])


def test_the_slow_node_is_found_by_what_it_measures(tmp_path):
    def hook(rank):
        if rank == 2:
            measure._median_s = slowed(measure._median_s, 10)

    done, found = doctor(tmp_path, 4, hook)
    assert done.codes == (2,) * 4, done.err
    assert set(problems(found)) == {"n2"} and "--exclude=n2" in problems(found)["n2"]["remedy"]
    slow = next(each for each in found["nodes"] if each["host"] == "n2")
    assert slow["speeds"]["matmul"]["ratio"] < 0.3


def test_a_slow_network_card_is_found(tmp_path):
    def hook(rank):
        if rank == 1:
            measure.pair_bytes_per_s = with_speed(1e8)

    done, found = doctor(tmp_path, 4, hook)
    assert done.codes == (2,) * 4, done.err
    assert set(problems(found)) == {"n1"} and "network" in problems(found)["n1"]["value"]


@pytest.mark.slow
def test_a_node_that_does_not_come_is_named_and_the_others_are_measured(tmp_path):
    done, found = doctor(tmp_path, 3, start_only=(0, 1))
    assert done.codes == (2, 2), done.err
    assert "did not come" in problems(found)["rank 2"]["value"]
    assert [each["host"] for each in found["nodes"]] == ["n0", "n1"] and len(found["pairs"]) == 1


@pytest.mark.slow
def test_a_node_that_hangs_in_its_checks_is_named(tmp_path):
    def hook(rank):
        if rank == 1:
            measure.matmul_flops_per_s = lambda device: os.kill(os.getpid(), signal.SIGSTOP)

    done, found = doctor(tmp_path, 3, hook)
    assert done.codes[0] == done.codes[2] == 2, done.err
    assert set(problems(found)) == {"n1"} and "--exclude=n1" in problems(found)["n1"]["remedy"]
    assert [pair["hosts"] for pair in found["pairs"]] == [["n0", "n2"]]


@pytest.mark.slow
def test_a_node_that_hangs_in_the_messages_is_named_and_no_other(tmp_path):
    def hook(rank):
        if rank == 2:
            measure.pair_bytes_per_s = lambda peer, device: os.kill(os.getpid(), signal.SIGSTOP)

    done, found = doctor(tmp_path, 4, hook)
    assert [code for rank, code in enumerate(done.codes) if rank != 2] == [2, 2, 2], done.err
    assert set(problems(found)) == {"n2"} and "fell silent" in problems(found)["n2"]["value"]
    met = sorted(tuple(pair["hosts"]) for pair in found["pairs"])
    assert met == [("n0", "n1"), ("n0", "n3"), ("n1", "n3")]


def test_nodes_that_differ_or_fail_are_named(tmp_path):
    def hook(rank):
        if rank == 1:
            found = across.versions()
            across.versions = lambda: {**found, "torch": "1.0"}
            now = time.time
            across.time.time = lambda: now() + 3600
        if rank == 2:

            def fails(device):
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")

            measure.matmul_flops_per_s = fails

    done, found = doctor(tmp_path, 3, hook)
    assert done.codes == (2, 2, 2), done.err
    named = problems(found)
    assert "n1: 1.0" in named["torch"]["value"] and "ECC error" in named["n2"]["value"]
    assert any("clock" in each["value"] and each["name"] == "n1" for each in found["findings"])


@pytest.mark.parametrize("directory", ["run", "made/by/the/first/run"])
def test_a_directory_that_a_node_does_not_see(tmp_path, directory):
    (tmp_path / "own/run").mkdir(parents=True)

    def hook(rank):
        across._SEEN_S = 0.5
        if rank == 1:
            os.chdir(tmp_path / "own")

    done, found = doctor(tmp_path, 2, hook, directory)
    assert done.codes == (2, 2), done.err
    assert "n1" in problems(found)["run directory"]["value"]


def test_several_ranks_of_a_node_are_measured_once(tmp_path):
    def hook(rank):
        os.environ["SLURMD_NODENAME"] = f"n{rank // 2}"

    done, found = doctor(tmp_path, 4, hook)
    assert done.codes == (0,) * 4, done.err
    assert [each["host"] for each in found["nodes"]] == ["n0", "n1"] and len(found["pairs"]) == 1

"""The doctor's parsers, on outputs of real programs and on broken ones; its verdicts; the command on this machine."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridflow import cli
from hybridflow.doctor import compare, files, gpus, guard, host, message_passing, report, slurm, software
from hybridflow.doctor.command import nodes_left, srun_command
from hybridflow.doctor.compare import NodeReport
from hybridflow.doctor.finding import NOTE, OK, PROBLEM, Finding, format_gib, worst
from hybridflow.doctor.rounds import partner, tournament
from hybridflow.mapping.hardware import hardware
from hybridflow.parallel.scontrol import parse_records
from hybridflow.programs import try_program
from hybridflow.rewards.sandbox import Bubblewrap
from tests.support.waiting import with_more_time

# As Slurm 22.05.8 printed them, shortened.
CONFIG = """Configuration data as of 2026-11-21T14:13:07
AuthInfo                = socket=/run/munge.socket,cred_expire=5
JobRequeue              = 1
KillOnBadExit           = 0
KillWait                = 5 sec
MpiDefault              = none
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
RequeueExit             = 75
SlurmctldHost[0]        = head(10.0.0.1)
SLURM_VERSION           = 22.05.8
SlurmdTimeout           = 10 sec
WaitTime                = 0 sec

MPI Plugins Configuration:
PMIxTimeout             = 300

Slurmctld(primary) at head is UP
"""
PARTITIONS = (
    "PartitionName=main AllowGroups=ALL AllowQos=ALL Default=YES QoS=N/A DefaultTime=00:30:00 GraceTime=0 Hidden=NO "
    "MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF State=UP "
    "TotalCPUs=32 TotalNodes=2 JobDefaults=(null) TRES=cpu=32,mem=125G,node=2,billing=32\n"
    "PartitionName=low DefaultTime=00:30:00 GraceTime=0 MaxNodes=UNLIMITED MaxTime=2-00:00:00 Nodes=n[1-2] "
    "PreemptMode=REQUEUE State=UP TotalCPUs=32 TotalNodes=2 TRES=cpu=32,mem=125G,node=2,billing=32\n"
)
JOB = (
    "JobId=1 JobName=my run=3 UserId=root(0) QOS=(null) JobState=RUNNING Requeue=0 Restarts=2 BatchFlag=1 ExitCode=0:0 "
    "TimeLimit=00:30:00 EndTime=2026-11-21T14:43:07 AllocNode:Sid=head:8397 NodeList=n[1-2] NumNodes=2 CPUs/Task=1 "
    "Partition=main Command=bash WorkDir=/data/a b/c Power= \n"
)
MPI_LIST = """MPI plugin types are...
\tpmix
\tnone
\tcray_shasta
\tpmi2
specific pmix plugin versions available: pmix_v4
"""
MPICH = "MPICH Version: 5.0.2 MPICH Release date: Fri Sep 25 20:45:26 UTC 2026 MPICH Device: ch4:ucx ofi"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11, repo rev: v5.0.11, Nov 2025"
MOUNTS = [
    SimpleNamespace(mountpoint=point, fstype=kind, opts=options)
    for point, kind, options in (
        *(("/proc", "proc", "rw,relatime"), ("/", "ext4", "rw,discard"), ("/dev/shm", "tmpfs", "rw,size=24684096k")),
        *(("/home", "nfs4", "rw,vers=4.2"), ("/scratch", "lustre", "ro,flock"), ("/home/over", "overlay", "rw")),
    )
]


def by_name(findings):
    return {finding.name: finding for finding in findings}


# ---- Slurm


def test_slurm_settings_are_read_and_judged():
    config = slurm.parse_config(CONFIG)
    assert config["SLURM_VERSION"] == "22.05.8" and config["SlurmctldHost[0]"] == "head(10.0.0.1)"
    assert config["AuthInfo"].endswith("cred_expire=5") and "Slurmctld(primary) at head is UP" not in config
    found = by_name(slurm.config_findings(config))
    assert [found[name].verdict for name in ("KillWait", "JobRequeue", "WaitTime")] == [NOTE, OK, OK]
    assert "--signal" in found["KillWait"].remedy and "waits 6 s" in found["requeue"].value
    assert found["RequeueExit"].value == "75 is in it" and "KillOnBadExit" not in found
    other = {
        "WaitTime": "5 sec",
        "JobRequeue": "0",
        "KillOnBadExit": "1",
        "KillWait": "30 sec",
        "RequeueExit": "175,1",
    }
    found = by_name(slurm.config_findings(other))
    assert [found[name].verdict for name in ("KillWait", "JobRequeue", "WaitTime", "KillOnBadExit")] == [
        OK,
        *[NOTE] * 3,
    ]
    assert found["RequeueExit"].value == "75 is not in it" and "121 s" in found["requeue"].value


def test_slurm_texts_that_are_broken_or_empty_give_what_they_hold():
    assert slurm.parse_config("slurm_load_ctl_conf error: Unable to contact slurm controller\n") == {}
    assert parse_records("No partitions in the system\n\n") == [] == slurm.partition_findings([], {})
    assert {finding.name for finding in slurm.config_findings({})} == {
        "version",
        "MpiDefault",
        "RequeueExit",
        "requeue",
    }
    assert slurm.job_findings([{}])[0].verdict == OK
    down = slurm.check_slurm({}, "scontrol ended with status 1: Unable to contact slurm controller")
    assert down[0].verdict == PROBLEM and "munge" in down[0].remedy
    assert slurm.check_slurm({}, "absent")[0].verdict == OK
    none = "scontrol ended with status 1: scontrol: fatal: Could not establish a configuration source"
    assert slurm.check_slurm({}, none)[0].verdict == NOTE


def test_slurm_records_keep_spaces_and_equal_signs():
    main, low = parse_records(PARTITIONS)
    assert main["TRES"] == "cpu=32,mem=125G,node=2,billing=32" and low["MaxTime"] == "2-00:00:00"
    (job,) = parse_records(JOB)
    assert job["JobName"] == "my run=3" and job["WorkDir"] == "/data/a b/c" and job["AllocNode:Sid"] == "head:8397"
    assert job["CPUs/Task"] == "1" and job["Power"] == ""


def test_preemption_without_grace_and_a_job_that_does_not_come_back():
    found = by_name(slurm.partition_findings(parse_records(PARTITIONS), slurm.parse_config(CONFIG)))
    assert found["partition main"].verdict == OK and found["partition low"].verdict == NOTE
    assert "save_every" in found["partition low"].remedy
    cancel = [{"PartitionName": "p", "PreemptMode": "CANCEL", "GraceTime": "300", "State": "UP"}]
    assert "CANCEL" in slurm.partition_findings(cancel, {"PreemptType": "preempt/qos"})[0].remedy
    assert slurm.partition_findings(cancel, {"PreemptType": "preempt/none"})[0].verdict == OK
    (job,) = slurm.job_findings(parse_records(JOB))
    assert job.verdict == NOTE and "--requeue" in job.remedy and "restarts 2" in job.value


def test_steps_are_told_from_batch_scripts_and_interactive_shells():
    assert slurm.in_step({"SLURM_STEP_ID": "0"}) and slurm.in_step({"SLURM_STEP_ID": "17"})
    # The shell of an interactive job, and the batch script, have numbers from 0xfffffffa on.
    assert not any(slurm.in_step({"SLURM_STEP_ID": text}) for text in ("4294967290", "4294967291", ""))
    assert not slurm.in_step({})


def test_srun_gets_one_task_on_each_node_whatever_the_job_asked_for():
    environ = {
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_JOB_ID": "7",
    }
    words = ["doctor", "--nodes", "/a b"]
    command, kept = srun_command({**environ, "HOME": "/h", "SLURM_STEP_ID": "4294967290"}, ["n1", "n2", "n4"], words)
    assert command[0] == "srun" and command[-4:] == ["hybridflow", *words] and sys.executable in command
    assert {"--nodes=3", "--nodelist=n1,n2,n4", "--ntasks=3", "--ntasks-per-node=1"} < set(command)
    assert kept == {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "7", "HOME": "/h"}


def test_a_job_is_not_looked_at_on_nodes_that_it_has_lost():
    listed = ["n1", "n2", "n3"]
    assert nodes_left(listed, [{"NodeList": "n[1,3]"}]) == (["n1", "n3"], ["n2"])
    assert nodes_left(listed, [{"NodeList": "n1"}, {"NodeList": "n[2-3]"}]) == (listed, [])
    assert nodes_left(listed, []) == nodes_left(listed, [{"NodeList": "(null)"}]) == (listed, [])


# ---- MPI


def test_mpi_plugins_and_libraries():
    assert message_passing.parse_mpi_list(MPI_LIST) == ("pmix", "none", "cray_shasta", "pmi2")
    older = "srun: MPI types are...\nsrun: pmi2\nsrun: pmix_v3\nsrun: none\nsrun: pmix\n"
    assert message_passing.parse_mpi_list(older) == ("pmi2", "none", "pmix")
    assert message_passing.parse_mpi_list("srun: error: something else\n") == ()
    assert [message_passing.library_kind(text) for text in (MPICH, OPEN_MPI, "x")] == ["MPICH", "Open MPI", ""]
    cray = "MPI VERSION    : CRAY MPICH version 8.1.27.26 (ANL base 3.4a2)"
    assert message_passing.library_kind(cray) == "CRAY MPICH" and message_passing.short_version(MPICH) == "MPICH 5.0.2"
    assert message_passing.short_version(OPEN_MPI) == "Open MPI 5.0.11"


@pytest.mark.parametrize(
    ("library", "plugins", "default", "verdict", "word"),
    [
        (MPICH, ("none", "pmi2", "pmix"), "none", OK, "pmi2 suits"),
        (MPICH, ("none", "pmi2", "pmix"), "pmix", NOTE, "--mpi=pmi2"),
        (OPEN_MPI, ("none", "pmi2", "pmix"), "pmix", OK, "pmix suits"),
        (OPEN_MPI, ("none", "pmi2"), "pmi2", NOTE, "--mpi=none"),
        ("Some MPI 1.0", ("none", "pmi2"), "none", NOTE, "not known"),
    ],
)
def test_which_srun_suits_which_library(library, plugins, default, verdict, word):
    found = by_name(message_passing.mpi_findings({"mpi": library, "mpi_reads_gpu": False}, plugins, default))
    assert found["srun --mpi"].verdict == verdict
    assert word in found["srun --mpi"].value + found["srun --mpi"].remedy
    assert "does not take" in found["GPU awareness"].value


def test_no_mpi_is_no_problem_and_a_broken_one_is_told():
    assert worst(message_passing.mpi_findings({"mpi": "absent", "failure": ""}, ("none",), "")) == OK
    (broken,) = message_passing.mpi_findings({"mpi_error": "RuntimeError: cannot load", "failure": ""}, ("none",), "")
    assert broken.verdict == NOTE and "cannot load" in broken.value


# ---- software and GPUs

PROBED = {"torch": "2.9.0", "cuda": "12.8", "hip": None, "failure": "", "nccl": "2.27.5", "gpu": "answers"}
GPU = {"index": 0, "name": "NVIDIA H200", "memory_gib": 139.8, "capability": "90"}


def test_lines_of_a_probe_survive_what_libraries_print_and_a_crash():
    text = 'warning: {not json\n{"torch": "2.9.0"}\n[1, 2]\n"text"\n{"cuda": null}\n{"half": '
    assert software.merge_lines(text) == {"torch": "2.9.0", "cuda": None}


def test_torch_that_cannot_be_imported_and_cuda_that_does_not_answer():
    (missing,) = software.torch_findings({"failure": "python3 was ended by SIGSEGV: and said nothing"})
    assert missing.verdict == PROBLEM and "SIGSEGV" in missing.value
    broken = {**PROBED, "gpu_error": "RuntimeError: The NVIDIA driver on your system is too old"}
    found = by_name(software.torch_findings(broken))
    assert found["CUDA in torch"].verdict == PROBLEM and "too old" in found["CUDA in torch"].value
    fine = by_name(software.torch_findings({**PROBED, "gpus": [GPU, {**GPU, "index": 1, "error": "no kernel image"}]}))
    assert fine["GPU 0 in torch"].verdict == OK and fine["GPU 1 in torch"].verdict == PROBLEM
    assert "NCCL 2.27.5" in fine["communication"].value
    (_, told, _) = software.torch_findings({**PROBED, "gpus": [{**GPU, "attention": "varlen"}]})
    assert told.value == "NVIDIA H200, 140 GiB, sm_90, attention by torch on packed tokens"


@pytest.mark.parametrize(
    ("module", "found", "verdict", "word"),
    [
        ("transformer_engine", {"transformer_engine": "absent"}, OK, "local layers"),
        ("transformer_engine", {"transformer_engine": "2.9", "gpus": [GPU]}, OK, "2.9, used"),
        ("transformer_engine", {"transformer_engine": "2.9"}, OK, "needs a GPU"),
        (
            "transformer_engine",
            {"transformer_engine": "2.12", "transformer_engine_misfit": "megatron-core needs", "gpus": [GPU]},
            NOTE,
            "2.12, not used: megatron-core needs; megatron-core's local layers",
        ),
        ("apex", {"apex": "installed", "apex_error": "undefined symbol"}, PROBLEM, "undefined symbol"),
        ("apex", {"apex": "0.9", "apex_is_nvidia": False}, PROBLEM, "another project"),
        ("apex", {"failure": "python3 was ended by SIGABRT: abort"}, NOTE, "SIGABRT"),
    ],
)
def test_optional_packages(module, found, verdict, word):
    finding = software.optional(module, {"failure": "", **found})
    assert finding.verdict == verdict and word in finding.value


@pytest.mark.parametrize(
    ("found", "verdict", "word"),
    [
        ({"kernels": ""}, OK, "used"),
        ({"kernels": "not built; why"}, NOTE, "not built; why (without them"),
        ({"kernels_error": "ImportError: torch"}, NOTE, "ImportError"),
        ({"failure": "python3 was ended by SIGSEGV"}, NOTE, "SIGSEGV"),
    ],
)
def test_compiled_kernels(found, verdict, word):
    finding = software.kernels_finding({"failure": "", **found})
    assert finding.verdict == verdict and word in finding.value


def test_megatron_of_another_release():
    assert software.megatron_finding({"megatron": software.MEGATRON, "failure": ""}).verdict == OK
    assert software.megatron_finding({"megatron": "0.9.0", "failure": ""}).verdict == PROBLEM
    assert "no module" in software.megatron_finding({"megatron_error": "no module", "failure": ""}).value
    pinned = (Path(__file__).parents[3] / "setup.py").read_text()
    assert f'"megatron-core=={software.MEGATRON}"' in pinned


# In the form that nvidia-smi documents for --format=csv,noheader,nounits.
SMI = """0, NVIDIA H200, 570.86.15, 143771, 4, 0, Disabled
1, NVIDIA H200, 570.86.15, 143771, 81000, 0, Disabled
2, NVIDIA H200, 570.86.15, 143771, 4, 3, Disabled
3, NVIDIA H200, 570.86.15, 143771, 4, [N/A], Enabled
Unable to determine the device handle for GPU 0000:01:00.0: Unknown Error
"""


def test_gpus_of_the_driver():
    listed = gpus.parse_smi(SMI)
    assert [gpu.index for gpu in listed] == [0, 1, 2, 3] and listed[3].ecc_errors is None
    found = by_name(gpus.gpu_findings(listed, "", is_hidden=True))
    assert [found[f"GPU {index}"].verdict for index in range(4)] == [OK, NOTE, PROBLEM, PROBLEM]
    assert "3 uncorrected" in found["GPU 2"].value and found["CUDA_VISIBLE_DEVICES"].verdict == NOTE
    failed = gpus.gpu_findings([], "nvidia-smi ended with status 9: couldn't communicate", is_hidden=False)
    assert worst(failed) == PROBLEM and "couldn't communicate" in failed[0].value


# ---- run directory, machine, network


def test_mounts():
    def kind(path):
        return files.mount_of(path, MOUNTS).fstype

    assert [kind(path) for path in ("/", "/homes", "/home", "/home/me", "/home/over/x")] == [
        *("ext4", "ext4", "nfs4", "nfs4", "overlay")
    ]
    assert files.mount_of("/x", []) is None
    found = {
        path: files.mount_finding(path, files.mount_of(path, MOUNTS))
        for path in ("/home/me", "/scratch/a", "/dev/shm/a")
    }
    assert [finding.verdict for finding in found.values()] == [OK, PROBLEM, NOTE]
    assert "of the network" in found["/home/me"].value and "read-only" in found["/scratch/a"].value


def test_writing(tmp_path):
    written = files.write_probe(tmp_path, num_bytes=2**20)
    assert written.bytes_per_s > 0 and written.sync_s > 0 and not list(tmp_path.iterdir())
    slow = files.Written(bytes_per_s=10e6, sync_s=2.0, has_locks=False)
    assert [finding.verdict for finding in files.written_findings(slow)] == [NOTE, NOTE, PROBLEM]
    assert files.room_finding(2**30, 10**6).verdict == NOTE and files.room_finding(2**40, 5).verdict == NOTE
    assert files.room_finding(2**40, None).verdict == OK


def test_a_directory_that_is_not_there_yet_is_looked_at_where_it_would_be(tmp_path):
    found = by_name(files.check_directory(tmp_path / "runs/new"))
    assert found["file system"].value.startswith(str((tmp_path / "runs/new").resolve())) and "room" in found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "file: is no directory"),
        ("file/run", "file/run: Not a directory"),
        ("loop", "loop: Too many levels of symbolic links"),
        ("x" * 300, "x: File name too long"),
    ],
)
def test_where_no_directory_can_be_is_a_problem(tmp_path, name, said):
    """The place above it, which can be written, says nothing of it."""
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (finding,) = files.check_directory(tmp_path / name)
    assert finding.verdict == PROBLEM and finding.value.endswith(said) and finding.remedy


@pytest.mark.parametrize(
    ("problem", "bubblewrap", "verdict", "said"),
    [
        (None, Bubblewrap(path="/usr/bin/bwrap"), OK, "by bubblewrap (/usr/bin/bwrap)"),
        (None, Bubblewrap(path=None), OK, "by hybridflow itself (bwrap is not installed)"),
        (None, Bubblewrap(path="/usr/bin/bwrap", problem="no --size"), OK, "itself (/usr/bin/bwrap: no --size)"),
        ("forbidden", Bubblewrap(path=None), NOTE, "forbidden; reward.function=code is refused"),
    ],
)
def test_what_confines_programs(problem, bubblewrap, verdict, said):
    finding = host.sandbox_finding(problem, bubblewrap)
    assert finding.verdict == verdict and finding.value.endswith(said), finding


def test_limits():
    assert host.memlock_finding(8 * 2**20, has_fabric=False).verdict == OK
    assert host.memlock_finding(8 * 2**20, has_fabric=True).verdict == PROBLEM
    assert host.memlock_finding(-1, has_fabric=True).value == "unlimited"
    assert host.open_files_finding(1024, 524288).remedy.endswith("ulimit -n 524288")
    # To set what is set already helps nobody.
    assert "have the hard limit of 1024 raised" in host.open_files_finding(64, 1024).remedy
    assert host.shared_memory_finding(64 * 2**20, 64 * 2**20).verdict == PROBLEM
    step = {"SLURM_STEP_ID": "0"}
    assert host.cores_finding(32, [0], step).verdict == NOTE and host.cores_finding(32, [0], {}).verdict == OK
    assert "OMP_NUM_THREADS=8" in host.cores_finding(8, range(4), {"OMP_NUM_THREADS": "8"}).value


LOOPBACK = host.Interface(name="lo", address="127.0.0.1", is_up=True)
ETHERNET = host.Interface(name="eth0", address="192.0.2.2", is_up=True)
FABRIC = host.Interface(name="ib0", address="198.51.100.7", is_up=False)


@pytest.mark.parametrize(
    ("addresses", "of_many", "verdict", "word"),
    [
        (["192.0.2.2"], True, OK, ""),
        (["127.0.1.1"], True, PROBLEM, "GLOO_SOCKET_IFNAME=eth0"),  # Debian's line in /etc/hosts
        (["127.0.1.1"], False, NOTE, "127.0.1.1"),
        (["127.0.1.1", "192.0.2.2"], True, OK, ""),
        (["::1"], True, PROBLEM, "GLOO_SOCKET_IFNAME=eth0"),
        ([], True, PROBLEM, "/etc/hosts"),
        (["203.0.113.9"], True, PROBLEM, "/etc/hosts"),
    ],
)
def test_own_name(addresses, of_many, verdict, word):
    finding = host.name_finding("n1", addresses, [LOOPBACK, ETHERNET], of_many=of_many)
    assert finding.verdict == verdict and word in finding.remedy


@pytest.mark.parametrize(
    ("variable", "value", "verdict"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", OK),
        ("GLOO_SOCKET_IFNAME", "eth", PROBLEM),
        ("NCCL_SOCKET_IFNAME", "eth", OK),
        ("NCCL_SOCKET_IFNAME", "=eth", PROBLEM),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", OK),
        ("NCCL_SOCKET_IFNAME", "ib0", PROBLEM),
    ],
)
def test_chosen_interfaces(variable, value, verdict):
    assert host.chosen_finding(variable, value, [LOOPBACK, ETHERNET, FABRIC]).verdict == verdict


def test_ports_of_a_fabric(tmp_path):
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    found = by_name(host.fabric_findings(tmp_path))
    assert found["mlx5_0 port 1"].verdict == OK and found["mlx5_1 port 1"].verdict == NOTE


# ---- guards


def test_a_check_that_raises_or_hangs_holds_nothing_up():
    def fails():
        raise OSError("stale file handle")

    fine = Finding(area="fine", name="x", value="y")

    def check(limit_s):
        began = time.monotonic()
        found = guard.run_checks({"fails": fails, "fine": lambda: [fine], "hangs": lambda: time.sleep(60)}, limit_s)
        assert time.monotonic() - began < 40
        assert [finding.area for finding in found] == ["fails", "fine", "hangs"] and found[1] == fine
        assert "stale file handle" in found[0].value
        assert found[2].verdict == PROBLEM and f"{limit_s:g} s" in found[2].value

    with_more_time(check, 1.0, 10.0)


def test_programs_that_fail_crash_hang_or_are_not_there():
    run = [sys.executable, "-c"]
    assert try_program([*run, "print('a')"]) == ("a\n", "")
    out, failure = try_program([*run, "import os; print('a', flush=True); os.kill(os.getpid(), 11)"])
    assert out == "a\n" and "SIGSEGV" in failure
    assert "status 3" in try_program([*run, "import sys; print('why', file=sys.stderr); sys.exit(3)"])[1]

    def check(limit_s):
        sleeps = "import time; print('a', flush=True); time.sleep(60)"
        out, failure = try_program([*run, sleeps], deadline_s=limit_s)
        assert out == "a\n" and "did not end" in failure

    with_more_time(check, 1.0, 20.0)
    assert "cannot be run" in try_program(["/nowhere/tool"])[1]


# ---- nodes


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 7, 16, 17, 33, 64])
def test_rounds_of_pairs(number):
    rounds = tournament(number)
    met = [pair for pairs in rounds for pair in pairs]
    assert len(set(met)) == len(met) and all(0 <= one < other < number for one, other in met)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(set(busy)) == len(busy) == number - number % 2
        assert all(partner(node, pairs) is not None for node in busy)
    assert len(rounds) <= 15
    if number <= 16:
        assert len(met) == number * (number - 1) // 2


def node(name, **changes):
    speeds = {"matmul": 100e9, "memory": 20e9, "disk": 300e6}
    return replace(NodeReport(host=name, device="CPU", speeds=speeds, versions={"torch": "2.9"}), **changes)


def test_the_slow_node_is_named_and_only_it():
    nodes = [node("n1"), node("n2"), node("n3", speeds={"matmul": 60e9, "memory": 19e9, "disk": 100e6}), node("n4")]
    compute, disk = compare.slow_nodes(nodes)
    assert (compute.name, compute.verdict) == ("n3", PROBLEM) and "0.60 of the median" in compute.value
    assert "--exclude=n3" in compute.remedy and (disk.name, disk.verdict) == ("n3", NOTE)
    at_the_limit = node("n3", speeds={"matmul": compare.SLOW * 100e9, "memory": 20e9, "disk": 300e6})
    assert compare.slow_nodes([node("n1"), node("n2"), at_the_limit]) == []


def test_one_slow_gpu_of_eight_is_named():
    good, bad = {"matmul": 700e12, "memory": 4e12}, {"matmul": 300e12, "memory": 4e12}
    nodes = [
        node("n1", gpus=(good,) * 8, speeds=good),
        node("n2", gpus=(*(good,) * 5, bad, good, good), speeds={**good, "matmul": 300e12}),
    ]
    (found,) = compare.slow_nodes(nodes)
    assert found.name == "n2, GPU 5" and "--exclude=n2" in found.remedy


def test_a_slow_network_card_is_told_from_a_slow_link():
    hosts = ["n1", "n2", "n3", "n4"]
    pairs = {(one, other): 10e9 for place, one in enumerate(hosts) for other in hosts[place + 1 :]}
    card = {hosts: (3e9 if "n2" in hosts else speed) for hosts, speed in pairs.items()}
    nodes = compare.with_network([node(name) for name in hosts], card)
    assert [finding.name for finding in compare.slow_nodes(nodes)] == ["n2"]
    assert compare.slow_pairs(nodes, card, {}) == []
    # Among three, a good node has one good pair and one with the slow node.
    three = {("n1", "n2"): 3e9, ("n1", "n3"): 10e9, ("n2", "n3"): 3e9}
    assert [found.name for found in compare.slow_nodes(compare.with_network(nodes[:3], three))] == ["n2"]
    link = {**pairs, ("n2", "n3"): 3e9}
    nodes = compare.with_network([node(name) for name in hosts], link)
    assert compare.slow_nodes(nodes) == []
    assert [finding.name for finding in compare.slow_pairs(nodes, link, {})] == ["n2 with n3"]
    (broken,) = compare.slow_pairs(nodes, {}, {("n1", "n4"): "connection refused"})
    assert "refused" in broken.value and broken.name == "n1 with n4" and broken.verdict == PROBLEM


def test_nodes_that_differ():
    nodes = [node("n1"), node("n2", versions={"torch": "2.8"}, clock_s=60.0), node("n3", sees_directory=False)]
    found = by_name(compare.differences(nodes))
    assert found["torch"].verdict == PROBLEM and "n2: 2.8" in found["torch"].value
    assert "+60.0 s" in found["n2"].value and "n3" in found["run directory"].value
    assert [finding.value for finding in compare.differences([node("n1"), node("n2")])] == ["the same on all 2 nodes"]


def test_findings_of_nodes_are_told_once_or_with_their_nodes():
    same = Finding(area="a", name="same", value="1")
    nodes = [
        node("n1", findings=(same, Finding(area="a", name="time", value="1.0 ms"))),
        node("n2", findings=(same, Finding(area="a", name="time", value="1.1 ms"))),
        node("n3", findings=(same, Finding(area="a", name="time", value="99 ms", verdict=NOTE))),
    ]
    merged = [(finding.name, finding.value) for finding in compare.merge_findings(nodes)]
    assert merged == [("same", "1"), ("time", "on n1: 1.0 ms"), ("time", "on n3: 99 ms")]


def test_reports_go_through_json_unchanged():
    one = node("n1", gpus=({"matmul": 1.0, "memory": 2.0},), findings=(Finding(area="a", name="b", value="c"),))
    assert compare.report_from_dict(json.loads(json.dumps(asdict(one)))) == one


# ---- the report and the command


def test_text_names_problems_with_remedies_and_fits_the_line():
    findings = [
        Finding(area="one", name="long", value="word " * 60, verdict=PROBLEM, remedy="do " * 60),
        Finding(area="two", name="fine", value="yes"),
    ]
    text = report.as_text(findings, [node("n1"), node("n2")])
    assert max(map(len, text.splitlines())) <= 120 and "→ do do" in text and "problem long" in text
    assert "1 problem that will stop" in text and "n2    100" in text
    assert report.as_text(findings[1:]).endswith("nothing found that would stop a run")
    assert [format_gib(number) for number in (1, 2**20, 3 * 2**30, 2**41)] == ["1 B", "1.0 MiB", "3.0 GiB", "2.0 TiB"]


@pytest.mark.slow
def test_on_this_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    status = cli.main(["doctor", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == (2 if found["verdict"] == PROBLEM else 0)
    areas = {finding["area"] for finding in found["findings"]}
    assert areas == {"software", "GPUs", "MPI", "run directory", "machine", "network", "Slurm"}
    names = {finding["name"]: finding for finding in found["findings"]}
    assert names["torch"]["verdict"] == OK and names["megatron-core"]["verdict"] == OK and not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_stops_a_run():
    found = by_name(files.check_directory(Path("/proc/self")))
    assert found["writing"].verdict == PROBLEM


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "2"], "belong to --measure"),
        (["--measure", "--json"], "leave --nodes and --json out"),
        (["--measure", "--out", "mine.txt"], "expected a file NAME.yaml"),
        (["--measure", "--out", f"{__file__}/mine.yaml"], "cannot be written"),
    ],
)
def test_a_wrong_request_to_measure_is_refused_at_once(capsys, words, message):
    assert cli.main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_is_measured_and_plans_read_it(tmp_path):
    path = tmp_path / "new" / "measured.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "hybridflow", "doctor", "--measure", "--ranks", "1", "--out", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"plan auto RECIPE --hardware {path}" in done.stdout and "wider, update" in done.stdout
    found = hardware(str(path))
    assert found.dtype == "fp32" and found.ranks_per_node == 1 and found.crowding == 1
    # One core, old or new.
    assert 1e9 < found.flops < 1e12 and 1e9 < found.memory_bandwidth < 1e12
    assert found.error_percent is not None

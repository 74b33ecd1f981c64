"""When Slurm ends a job: from what it left in the environment, and from what it answers."""

import pytest

from hybridflow.parallel.scontrol import end_of, find_job_end, parse_records
from tests.support.programs import put_program

# As Slurm 22.05.8 prints it, shortened.
SHOWN = (
    "JobId=7 JobName=train UserId=root(0) JobState=RUNNING Reason=None Requeue=1 Restarts=2 RunTime=00:00:07 "
    "TimeLimit=00:05:00 StartTime=2026-11-20T10:00:00 EndTime=2026-11-20T10:05:00 Deadline=N/A NodeList=n[1-2]"
)
# 2026-11-20 is day 20777 since 1970-01-01, and 10:05 is 36,300 s.
END_S = 20777 * 86400 + 36300


def test_end_time_is_read_as_utc():
    assert [end_of(job) for job in parse_records(SHOWN)] == [END_S]


@pytest.mark.parametrize("text", ["", "EndTime=Unknown", "slurm_load_jobs error: Invalid job id specified"])
def test_unknown_end_is_none(text):
    assert not any(end_of(job) for job in parse_records(text))


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)


def test_outside_slurm_there_is_no_end():
    assert find_job_end() is None


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A directory on PATH for a program of that name, which prints a text."""

    def install(text, status=0):
        put_program(tmp_path / "scontrol", f"echo '{text}'\nexit {status}")
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_what_slurm_left_is_enough_at_the_start_and_asked_again_later(scontrol, monkeypatch):
    scontrol(SHOWN)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert find_job_end() == END_S
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")
    assert find_job_end() == 1000
    assert find_job_end(is_fresh=True) == END_S


def test_without_an_answer_what_was_told_counts(scontrol, monkeypatch):
    scontrol("slurm_load_jobs error: Unable to contact slurm controller", status=1)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert find_job_end() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")
    assert find_job_end(is_fresh=True) == 1000

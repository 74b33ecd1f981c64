"""The kit for a GPU: checks that pass, fail, hang or say nothing, and machines that lack something."""

from __future__ import annotations

import json
import math
import os
import sys
import zipfile
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"
sys.path.insert(0, str(TOOLS))

import gpu_kit  # noqa: E402
from gpu_checks import common  # noqa: E402

from tests.support.waiting import with_more_time  # noqa: E402

GPU = {"gpu": "Pretended GPU", "versions": "torch 0"}


def passing(result: str) -> str:
    """A check that passes with an expression as its result."""
    return f'import json, os; print(json.dumps({{"passed": True, "result": {result}, "figures": {{"x": 1}}}}))'


PROGRAMS = {
    "good": 'print("noise"); ' + passing('"a | b"'),
    "bad": 'import json; print(json.dumps({"passed": False, "result": "x is 2, must be <= 1", "figures": {}}))',
    "broken": 'raise SystemExit("error: no such tensor")',
    "silent": "",
    "hanging": """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
""",
}


def hang_for(monkeypatch, limit_s: float) -> None:
    """Give the check that hangs so much time."""
    table = tuple(
        gpu_kit.Check(name, f"check_{name}", deadline_s=limit_s if name == "hanging" else 60) for name in PROGRAMS
    )
    monkeypatch.setattr(gpu_kit, "CHECKS", {"correctness": table})


@pytest.fixture(autouse=True)
def checks(monkeypatch, tmp_path):
    """Programs of a moment in place of the checks."""
    for name, text in PROGRAMS.items():
        (tmp_path / f"check_{name}.py").write_text(text)
    hang_for(monkeypatch, 1)
    monkeypatch.setattr(gpu_kit, "_ask", lambda environment: dict(GPU))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))


def run(tmp_path, *words: str) -> int:
    return gpu_kit.main(["correctness", "--out", str(tmp_path / "out"), *words])


def results(tmp_path) -> dict[str, dict]:
    return json.loads((tmp_path / "out/results.json").read_text())


def test_each_check_is_reported_as_what_it_was(tmp_path, capsys, monkeypatch):
    def check(limit_s):
        hang_for(monkeypatch, limit_s)
        check_reports(tmp_path, capsys, limit_s)

    with_more_time(check, 1, 30)


def check_reports(tmp_path, capsys, limit_s):
    assert run(tmp_path) == 1
    found = results(tmp_path)
    assert {name: row["status"] for name, row in found.items()} == {
        "good": "passed",
        "bad": "failed",
        "broken": "failed",
        "silent": "failed",
        "hanging": "out of time",
    }
    assert found["good"]["figures"] == {"x": 1}
    assert found["bad"]["result"] == "x is 2, must be <= 1"
    assert found["broken"]["result"] == "exit status 1: error: no such tensor"
    assert "no result" in found["silent"]["result"] and f"after {limit_s} s" in found["hanging"]["result"]
    rows = (tmp_path / "out/results.md").read_text().splitlines()
    assert rows[0] == "| check | GPU and versions | commit | result |" and len(rows) == 2 + len(PROGRAMS)
    commit = gpu_kit.find_commit(None)
    assert rows[2].startswith(f"| good | Pretended GPU; torch 0 | {commit} | passed in ") and rows[2].endswith(
        r"a \| b |"
    )
    assert "error: no such tensor" in (tmp_path / "out/log.txt").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 3 failed, 1 out of time, 0 not run"
    for pid in (tmp_path / "pids").read_text().split():
        # Ended, and no one's child any more, or not yet taken away by init.
        status = Path(f"/proc/{pid}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()


def test_a_check_alone_that_passes_keeps_the_results_of_others(tmp_path):
    assert run(tmp_path, "--only", "bad") == 1
    assert run(tmp_path, "--only", "good") == 0
    assert [row["status"] for row in results(tmp_path).values()] == ["failed", "passed"]


def test_results_are_there_after_each_check(tmp_path, monkeypatch):
    (tmp_path / "check_bad.py").write_text(passing('open(os.environ["RESULTS"]).read()'))
    monkeypatch.setenv("RESULTS", str(tmp_path / "out/results.json"))
    assert run(tmp_path, "--only", "good", "bad") == 0
    assert list(json.loads(results(tmp_path)["bad"]["result"])) == ["good"]


def test_a_check_out_of_time_has_told_what_it_knew(tmp_path, monkeypatch):
    so_far = (
        'import json; print(json.dumps({"passed": False, "result": "two of nine", "figures": {"x": 2}}), flush=True)'
    )
    (tmp_path / "check_hanging.py").write_text(f"{so_far}\n{PROGRAMS['hanging']}")

    def check(limit_s):
        hang_for(monkeypatch, limit_s)
        assert run(tmp_path, "--only", "hanging") == 1
        row = results(tmp_path)["hanging"]
        assert (row["status"], row["figures"]) == ("out of time", {"x": 2})
        assert row["result"] == f"after {limit_s} s: two of nine"

    with_more_time(check, 1, 30)


def test_no_check_is_started_when_time_is_nearly_used(tmp_path):
    assert run(tmp_path, "--deadline", "5") == 1
    assert {row["status"] for row in results(tmp_path).values()} == {"not run"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        pytest.param(["--only", "good"], "torch finds no GPU (torch 0)", id="no GPU"),
        pytest.param(["--only", "strange"], "no such check in correctness; there are good, bad", id="no such check"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, monkeypatch, capsys, words, error):
    monkeypatch.setattr(gpu_kit, "_ask", lambda environment: {**GPU, "gpu": None})
    assert run(tmp_path, *words) == 2
    assert error in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_is_missing_is_installed_from_what_was_carried(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_kit, "_has_megatron", lambda: False)
    assert run(tmp_path) == 2
    assert "add --carried FOLDER" in capsys.readouterr().err
    carried = tmp_path / "carried"
    carried.mkdir()
    with zipfile.ZipFile(carried / "carried_module-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_module.py", "RESULT = 'carried'")
        wheel.writestr(
            "carried_module-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried-module\nVersion: 1.0\n"
        )
        wheel.writestr(
            "carried_module-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("carried_module-1.0.dist-info/RECORD", "")
    (tmp_path / "check_good.py").write_text(passing('__import__("carried_module").RESULT'))
    assert run(tmp_path, "--only", "good", "--carried", str(carried)) == 0
    assert results(tmp_path)["good"]["result"] == "carried"


def test_the_pack_has_the_wheel_that_setup_asks_for_and_stays_small(tmp_path, monkeypatch, capsys):
    asked = []

    def download(command, **_):
        asked.append([str(word) for word in command])
        (tmp_path / "packed/megatron_core.whl").write_bytes(bytes(100))
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(gpu_kit, "find_commit", lambda carried: "abc1234")
    monkeypatch.setattr(gpu_kit.subprocess, "run", download)
    assert gpu_kit.main(["--pack", str(tmp_path / "packed")]) == 0
    assert asked[0][-1].startswith("megatron-core==") and "--no-deps" in asked[0]
    assert (tmp_path / "packed/commit.txt").read_text() == "abc1234\n"
    monkeypatch.setattr(gpu_kit, "MOST_PACKED_BYTES", 50)
    assert gpu_kit.main(["--pack", str(tmp_path / "packed")]) == 2
    assert "empty it first" in capsys.readouterr().err


def test_every_check_is_a_module_with_a_main_and_its_deadlines_leave_room(monkeypatch):
    monkeypatch.undo()
    for command, checks in gpu_kit.CHECKS.items():
        for check in checks:
            text = TOOLS.joinpath(*check.module.split(".")).with_suffix(".py").read_text()
            assert "def main(argument: str, is_dry: bool)" in text and "run(main)" in text, (command, check)
    names = [check.name for checks in gpu_kit.CHECKS.values() for check in checks]
    assert len(set(names)) == len(names) and os.path.isfile(TOOLS / "gpu_kit.py")


@pytest.mark.parametrize(("figure", "passes"), [(1.0, True), (1.1, False), (math.nan, False), (math.inf, False)])
def test_a_check_passes_if_all_bounds_hold_and_names_those_that_do_not(figure, passes):
    found = common.result("text", {"gap": (figure, "<=", 1.0), "rate": (2.0, ">=", 2.0)}, {"gap": figure})
    assert found["passed"] is passes
    assert found["result"] == ("text" if passes else f"text; gap is {figure:.3g}, must be <= 1")


def test_jobs_are_equal_where_losses_are_near_and_rewards_the_same():
    row = {"step": 1, "actor/loss": 0.25, "actor/grad_norm": 1.0, "reward/mean": 0.5}
    for change, missed in ({"actor/loss": 0.25005}, 0), ({"actor/loss": 0.26}, 1), ({"reward/mean": 0.5001}, 1):
        found = common.result("", common.compare_jobs([{**row, **change}], [row]), {})
        assert found["result"].count("must be") == missed, change
    with pytest.raises(common.CheckError, match=r"steps \[1\] beside \[\]"):
        common.compare_jobs([row], [])

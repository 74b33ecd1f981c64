"""Where the numbers go beside the run: a Pushgateway, the node exporter's file, W&B offline; and what fails there."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridflow.config.metrics import WandbConfig
from hybridflow.errors import ConfigError
from hybridflow.observe import exporters
from hybridflow.observe.exporters import (
    Callback,
    MetricsExporter,
    Outlet,
    WandbExporter,
    close_outlets,
    open_outlets,
)
from hybridflow.observe.metrics import read_metrics
from hybridflow.observe.summary import write_summary
from hybridflow.parallel.world import World
from hybridflow.recipe.load import load_recipe
from hybridflow.sections import to_dict
from hybridflow.trainer.record import Record
from hybridflow.trainer.step_metrics import Share
from tests.e2e.commands import free_port
from tests.support.waiting import wait_until

GATEWAY = shutil.which("prometheus-pushgateway")
METRICS = {"reward/mean": 0.5, "time/step_s": 2.0, "kl/ref": math.nan}


def gauges(text: str) -> dict[tuple[str, str], float]:
    """(name, run) -> value, of text in Prometheus' format."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(each.name, each.labels["run"]): each.value for each in samples if "run" in each.labels}


@pytest.fixture
def gateway():
    if GATEWAY is None:
        pytest.skip("needs prometheus-pushgateway: tests/support/apt.sh installs it")
    url = f"http://127.0.0.1:{free_port()}"
    address = f"--web.listen-address={url.removeprefix('http://')}"
    process = subprocess.Popen([GATEWAY, address], stderr=subprocess.DEVNULL)

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"{url}/-/ready", timeout=30).status == 200
        except OSError:
            return False

    try:
        wait_until(answers)
        yield url
    finally:
        process.kill()
        process.wait()


def read(url: str) -> dict[tuple[str, str], float]:
    return gauges(urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode())


def test_a_pushgateway_has_the_last_step_of_each_run(gateway):
    for run, step in (("one", 3), ("search/two", 1)):
        exporter = MetricsExporter(pushgateway_url=gateway, job_name="training", run=run)
        exporter.export(step, {"reward/mean": 0.0})
        exporter.export(step + 1, METRICS)
        exporter.close()
    found = read(gateway)
    for run, step in (("one", 4), ("search/two", 2)):
        assert found["hybridflow_step", run] == step
        assert found["hybridflow_reward_mean", run] == 0.5 and found["hybridflow_time_step_s", run] == 2.0
        assert math.isnan(found["hybridflow_kl_ref", run])


def test_the_node_exporter_finds_a_whole_file(tmp_path):
    path = tmp_path / "run.prom"
    exporter = MetricsExporter(textfile=str(path), run="one")
    # Two names that are written alike are one gauge.
    exporter.export(1, {"reward_mean": 0.1, **METRICS})
    assert gauges(path.read_text())["hybridflow_reward_mean", "one"] == 0.5
    assert [each.name for each in tmp_path.iterdir()] == ["run.prom"]
    # A validation after a step adds to it. What the next step does not measure is not shown with its number.
    exporter.export(1, {"validation/score": 0.75})
    assert gauges(path.read_text())["hybridflow_time_step_s", "one"] == 2.0
    exporter.export(2, {"time/step_s": 3.0})
    names = ("hybridflow_step", "hybridflow_time_step_s", "hybridflow_validation_score")
    assert gauges(path.read_text()) == dict(zip([(name, "one") for name in names], (2, 3.0, 0.75), strict=True))
    exporter.export(3, METRICS)
    assert gauges(path.read_text())["hybridflow_reward_mean", "one"] == 0.5


@pytest.mark.parametrize("is_said_by", ["recipe", "variable"])
def test_weights_and_biases_has_the_steps_offline_and_knows_a_run_again(tmp_path, monkeypatch, is_said_by):
    settings = WandbConfig(project="tests", offline=is_said_by == "recipe")
    if is_said_by == "variable":
        monkeypatch.setenv("WANDB_MODE", "offline")
    for first, is_resumed in ((1, False), (3, True)):
        exporter = WandbExporter(settings, "one", tmp_path, is_resumed=is_resumed)
        for step in (first, first + 1):
            exporter.export(step, METRICS)
        exporter.close()
    number = (tmp_path / "wandb/run_id").read_text()
    kept = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [each.name for each in kept] == [f"run-{number}.wandb"] * 2 and all(each.stat().st_size for each in kept)


def test_weights_and_biases_has_the_settings_and_no_secret(tmp_path, monkeypatch):
    began = []
    run = SimpleNamespace(log=lambda metrics, step: None, finish=lambda: None)
    fake = SimpleNamespace(login=lambda prompt: True, init=lambda **settings: began.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    reward = "reward={service: {urls: ['http://rewards:8000'], auth_env: MY_TOKEN}}"
    recipe = load_recipe("grpo", ["metrics.wandb={project: a}", reward, "actor.optimizer.lr=0.003"])
    (outlet,) = open_outlets(recipe, tmp_path, is_resumed=True)
    outlet.send(1, METRICS)
    close_outlets([outlet], 20.0)
    (settings,) = began
    assert settings["config"]["actor"]["optimizer"]["lr"] == 0.003 and settings["allow_val_change"]
    assert settings["config"]["reward"]["service"]["auth_env"] == "MY_TOKEN" and "hunter2" not in str(settings)


def test_without_a_key_nobody_is_asked_for_one(tmp_path, monkeypatch):
    for name, value in (("WANDB_API_KEY", ""), ("HOME", str(tmp_path)), ("NETRC", str(tmp_path / "netrc"))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY")
    exporter = WandbExporter(WandbConfig(project="tests"), "one", tmp_path)
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        exporter.export(1, METRICS)


class Rude:
    """Fails in some steps, or never comes back."""

    def __init__(self, fails=(), hangs=False):
        self.taken, self.is_closed, self._fails = [], threading.Event(), fails
        self._hold = threading.Event()
        if not hangs:
            self._hold.set()

    def export(self, step, metrics):
        self._hold.wait()
        if step in self._fails:
            raise OSError("nobody there")
        self.taken.append((step, dict(metrics)))

    def close(self):
        self.is_closed.set()


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr(exporters, "tell", lines.append)
    return lines


def test_a_failure_is_told_once_and_the_next_steps_come(told):
    exporter = Rude(fails=(2, 3))
    outlet = Outlet("there", exporter)
    for step in range(1, 6):
        outlet.send(step, {"reward/mean": step})
    close_outlets([outlet], 10)
    assert exporter.taken == [(step, {"reward/mean": step}) for step in (1, 4, 5)] and exporter.is_closed.is_set()
    assert told == [
        "metrics to there: step 2: OSError: nobody there; training goes on",
        "metrics to there: step 4: sent again",
        "metrics to there: 2 of 5 steps were not sent",
    ]


def test_who_hangs_holds_up_nobody_and_the_oldest_steps_are_lost(told):
    outlets = [Outlet(name, Rude(hangs=True)) for name in ("one", "two")]
    begin_s = time.monotonic()
    for step in range(exporters.MOST_WAITING + 10):
        for outlet in outlets:
            outlet.send(step, METRICS)
    close_outlets(outlets, 0.2)
    assert time.monotonic() - begin_s < 30
    number = exporters.MOST_WAITING + 10
    assert told == [f"metrics to {name}: {number} of {number} steps were not sent" for name in ("one", "two")]


def test_what_never_worked_is_not_said_to_work_and_who_exits_ends_nothing(told):
    def leave(step: int, metrics: object) -> None:
        sys.exit("no more")

    outlet = Outlet("there", Callback(leave))
    for step in (1, 2):
        outlet.send(step, METRICS)
    close_outlets([outlet], 10)
    assert told == [
        "metrics to there: step 1: SystemExit: no more; training goes on",
        "metrics to there: 2 of 2 steps were not sent",
    ]


TAKEN = []


def callback(step, metrics):
    TAKEN.append((step, dict(metrics)))


def test_a_run_sends_its_steps_with_the_names_of_its_namespace(tmp_path):
    textfile = tmp_path / "run.prom"
    overrides = [f"run_dir={tmp_path / 'run'}", "namespace=search-rl", "cluster.ranks=4"]
    overrides += [f"metrics={{callbacks: ['{__name__}:callback'], prometheus: {{textfile: '{textfile}'}}}}"]
    recipe = load_recipe("grpo", overrides)
    world = World(rank=0, size=1, ranks_per_node=1, device=torch.device("cpu"), deadline_s=60.0, store=dist.HashStore())
    try:
        record = Record(recipe, world, 1)
        write_summary(Path(recipe.run_dir), {"accuracy_after_rl": 0.75})
        kept = {"name": "old", "ranks": 8, "score_before_rl": 0.5}
        record.resume(record.state() | {"summary": kept})
        assert record.summary == {"name": "grpo", "algorithm": "grpo", "ranks": 1, "score_before_rl": 0.5}
        record.open(None)
        # What an earlier run has left.
        assert not (Path(recipe.run_dir) / "summary.json").exists()
        record.draw(0, {"validation/score": 0.5})
        record.begin_step(0, None)
        record.end_step(1, [Share({"reward/mean": 0.25, "batch/num_tokens": 8.0})])
        record.finish(1, is_done=False)
    finally:
        # Ranks that later tests fork have a world of their own.
        dist.destroy_process_group()
    found = gauges(textfile.read_text())
    assert found["hybridflow_search_rl_reward_mean", "search-rl/grpo"] == 0.25
    assert found["hybridflow_search_rl_validation_score", "search-rl/grpo"] == 0.5
    # A function that reads metrics of each step gets steps alone.
    ((step, metrics),) = TAKEN
    assert step == 1 and metrics["search-rl/reward/mean"] == 0.25
    (text,) = EventAccumulator(f"{recipe.run_dir}/tensorboard").Reload().Tensors("search-rl/recipe")
    told = text.tensor_proto.string_val[0].decode()
    assert yaml.safe_load(told.removeprefix("```yaml\n").removesuffix("```")) == to_dict(recipe)
    # The run's own file is in its own folder.
    assert read_metrics(Path(recipe.run_dir))[0]["reward/mean"] == 0.25


def test_a_run_of_a_namespace_has_a_place_of_its_own():
    assert load_recipe("grpo", ["namespace=search-rl"]).run_dir == "runs/search-rl/grpo"


@pytest.mark.parametrize(
    "setting, words",
    [
        ("metrics.prometheus={}", "pushgateway_url, textfile"),
        ("metrics.prometheus={textfile: /tmp/run.txt}", "end in .prom"),
        ("metrics.prometheus={pushgateway_url: 'http://me:secret@host'}", "(?s)^(?!.*secret).*password"),
        ("metrics.prometheus={pushgateway_url: 'host:9091'}", "expected an address"),
        ("metrics.callbacks=['print']", "metrics.callbacks"),
        ("metrics.wandb={}", "metrics.wandb.project: missing"),
        ("namespace=a/b", "namespace"),
    ],
)
def test_what_leads_nowhere_is_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        load_recipe("grpo", [setting])


def test_what_is_not_there_is_refused_before_the_first_step(tmp_path, monkeypatch):
    recipe = load_recipe("grpo", ["metrics.callbacks=['nowhere:callback']"])
    # Before the models are made, which need the record.
    with pytest.raises(ConfigError, match="metrics.callbacks='nowhere:callback'"):
        Record(recipe, SimpleNamespace(rank=0, size=1, device=torch.device("cpu")), 1)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=lambda key=None: True))
    with pytest.raises(ConfigError, match=r"needs wandb 0.30 or newer"):
        WandbExporter(WandbConfig(project="tests"), "one", tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    recipe = replace(recipe, metrics=load_recipe("grpo", ["metrics.wandb={project: a}"]).metrics)
    with pytest.raises(ConfigError, match=r"pip install 'hybridflow\[wandb\]'"):
        open_outlets(recipe, tmp_path, is_resumed=False)

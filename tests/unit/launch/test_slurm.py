"""Site settings, the batch file, what is checked before a job is submitted, and what is kept of a launch."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hybridflow
from hybridflow import cli
from hybridflow.errors import ConfigError, LayoutError, WriteError
from hybridflow.launch import snapshot, submit
from hybridflow.launch.batch import BatchJob, render_batch, shipped_body
from hybridflow.launch.checks import node_range, time_limit
from hybridflow.launch.command import mpi_command
from hybridflow.launch.site import Container, Site, check_site, load_site, seconds_of, texts
from hybridflow.launch.submit import job_state
from hybridflow.parallel.scontrol import parse_records
from hybridflow.recipe.load import find_recipe, load_recipe, recipe_for_ranks
from hybridflow.sections import to_dict
from tests.support.programs import put_program
from tests.support.recipes import write_config

RECORDS = Path(__file__).parent / "records"
# What a shell, sbatch or srun could take for something else.
NASTY = [
    "a b",
    "it's",
    'say "hi"',
    "x; touch hacked",
    "$(touch hacked)",
    "`touch hacked`",
    "back\\slash",
    "#tag",
    "ü*?[]~!&|<>",
]


def job(**changes):
    given = dict(
        name="sums",
        folder=Path("/home/ada/work"),
        run_dir=Path("/scratch/ada/sums"),
        recipe=Path("/scratch/ada/sums/launch/0001/recipe.yaml"),
        code=Path("/scratch/ada/sums/launch/0001/code"),
        nodes=(2, 2),
        ranks_per_node=4,
        threads_per_rank=1,
        time="24:00:00",
        site=Site(),
        body='printf "%s\\n" "$@" ${container[@]+"${container[@]}"} ${srun_options[@]+"${srun_options[@]}"}\n',
    )
    return BatchJob(**{**given, **changes})


JOBS = {
    "plain": job(),
    "gpus": job(
        nodes=(6, 8),
        ranks_per_node=8,
        site=Site(
            account="nlp",
            partition="gpu",
            qos="normal",
            constraint="h100&nvlink",
            time="24:00:00",
            gpus_per_node=8,
            gpu_type="h100",
            gpu_memory_gb=80.0,
            cpus_per_task=12,
            memory="0",
            exclusive=True,
            mpi="pmix",
            modules=("gcc/13", "cuda/12.4"),
            setup=("source ~/venvs/hybridflow/bin/activate",),
            options=("--mail-type=END", "--switches=1"),
            signal_lead_s=300,
        ),
    ),
    "apptainer": job(
        site=Site(
            gpus_per_node=4,
            gpu_option="gres",
            container=Container(kind="apptainer", image="/images/flow.sif", mounts=("/data",)),
        )
    ),
    "pyxis": job(
        code=None,
        site=Site(
            gpus_per_node=4,
            gpu_option="none",
            container=Container(kind="pyxis", image="nvcr.io#nvidia/pytorch:25.01-py3", mounts=("/data", "/a:/b:ro")),
        ),
    ),
    "nasty": job(
        folder=Path("/home/a b/$(touch hacked)"),
        run_dir=Path('/scratch/it\'s; 100% "mine"'),
        recipe=Path('/scratch/it\'s; 100% "mine"/launch/0001/recipe.yaml'),
        code=Path('/scratch/it\'s; 100% "mine"/launch/0001/code'),
        site=Site(
            account="a b; touch hacked",
            partition="`touch hacked`",
            qos="it's",
            constraint="[a*2&b*2]|$(touch hacked)",
            gpus_per_node=4,
            gpu_type="h 100",
            memory="back\\slash",
            modules=("gcc; touch hacked", "$(touch hacked)"),
            container=Container(kind="apptainer", image="my image's.sif", mounts=("/a b:/c",)),
            options=('--comment=say "hi" #1',),
        ),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_batch_files_are_as_recorded(name):
    """Written anew with HYBRIDFLOW_RECORD=1 only; look at what changed."""
    path, found = RECORDS / f"{name}.sbatch", render_batch(JOBS[name])
    if os.environ.get("HYBRIDFLOW_RECORD") == "1":
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


def printed_by(batch, folder):
    """What the body of a batch file sees: its arguments, the container's words, srun's options, and PYTHONPATH."""
    body = 'printf "%s\\0" "$PYTHONPATH" "${modules[@]}" -- "$@" -- "${container[@]}" -- "${srun_options[@]}"\n'
    module = 'modules=(); module() { modules+=("$*"); }\n'
    text = render_batch(dataclasses.replace(batch, body=body))
    done = subprocess.run(
        ["bash", "-uc", module + text], cwd=folder, capture_output=True, check=True, env={"PATH": os.environ["PATH"]}
    )
    parts, current = [], []
    for word in [*done.stdout.decode().split("\0")[:-1], "--"]:
        if word == "--":
            parts.append(current)
            current = []
        else:
            current.append(word)
    assert list(folder.iterdir()) == []
    return parts


@pytest.mark.parametrize("value", NASTY)
def test_nasty_values_arrive_as_they_are(value, tmp_path):
    base, container = Path(f"/base/{value}"), Container(kind="apptainer", image=value, mounts=(f"/{value}",))
    batch = job(
        folder=base,
        run_dir=Path("/run"),
        recipe=base / "recipe.yaml",
        code=base / "code",
        site=Site(modules=(value, "other"), container=container),
    )
    (path, *modules), arguments, words, options = printed_by(batch, tmp_path)
    assert (path, modules) == (str(base / "code"), [f"load {value}", "load other"])
    assert (arguments, options) == ([str(base / "recipe.yaml")], [])
    binds = ["--bind", f"{base}:{base}", "--bind", "/run:/run", "--bind", f"/{value}"]
    assert words == ["apptainer", "exec", *binds, "--pwd", str(base), value]
    pyxis = dataclasses.replace(container, kind="pyxis")
    *_, words, options = printed_by(dataclasses.replace(batch, site=Site(modules=("m",), container=pyxis)), tmp_path)
    assert words == [] and options == [
        f"--container-image={value}",
        f"--container-mounts={base}:{base},/run:/run,/{value}:/{value}",
        f"--container-workdir={base}",
    ]


def put(site, key, value):
    """The settings with one text, or one element of a list of texts, replaced."""
    name, _, rest = key.partition(".")
    if rest:
        return dataclasses.replace(site, **{name: put(getattr(site, name), rest, value)})
    name, is_list, _ = key.partition("[")
    return dataclasses.replace(site, **{name: (value,) if is_list else value})


FULL = dataclasses.replace(
    JOBS["gpus"].site,
    modules=("gcc",),
    options=("--a",),
    container=Container(kind="apptainer", image="image", mounts=("/data",)),
)
FREE = [key for key, _ in texts(to_dict(FULL)) if key not in ("gpu_option", "mpi", "container.kind")]


@pytest.mark.parametrize("key", FREE)
@pytest.mark.parametrize("value", ["a\nrm -rf /", "a\r", "a\x00b", "a\u2028b", " "])
def test_no_setting_of_a_site_can_leave_its_line(key, value):
    with pytest.raises(ConfigError, match=re.escape(f"site.yaml: {key}")):
        check_site(put(FULL, key, value), "site.yaml")


def test_every_text_of_a_site_is_checked():
    """A setting that is added to Site is put into FULL, and so among those above."""
    kinds = [item.name for item in dataclasses.fields(Site) if "str" in str(item.type)]
    assert {key.partition("[")[0].partition(".")[0] for key in FREE} == {*kinds, "container"}


@pytest.mark.parametrize("key", ["folder", "run_dir", "recipe"])
def test_paths_with_line_breaks_are_refused(key):
    with pytest.raises(ConfigError, match="which no batch file can hold"):
        render_batch(job(**{key: Path("/a\nb")}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(run_dir=Path("/a\\b")), "backslash"),
        (
            dict(run_dir=Path("/a:b"), code=Path("/a:b/launch/0001/code")),
            "run_dir /a:b: its ':' would split PYTHONPATH",
        ),
        (dict(run_dir=Path(os.fsdecode(b"/a\xff"))), "which no batch file can hold"),
        (dict(folder=Path("/a,b"), site=JOBS["pyxis"].site), "cannot be mounted"),
        (dict(run_dir=Path("/a:b"), site=JOBS["apptainer"].site), "cannot be mounted"),
    ],
)
def test_paths_that_slurm_or_a_container_would_misread_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        render_batch(job(**changes))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("acount: nlp", "acount: unknown key; did you mean account?"),
        ("time: 90", 'number 90; put it in quotes, as in time: "24:00:00"'),
        ("gpus_per_node: -1", "gpus_per_node: expected an integer of at least 0"),
        ("mpi: pmi", "mpi: expected one of none, pmi2, pmix"),
        ("container: {kind: pyxis}", "container.kind=pyxis with container.image=None; give both, or neither"),
        ("container: {image: a.sif}", "give both, or neither"),
        ("container: {kind: pyxis, image: a, mounts: ['/a,/b']}", "container.mounts: '/a,/b'"),
        ("options: [-p gpu]", "options: '-p gpu': expected --name or --name=value"),
        ("modules: gcc", "modules: expected a list of texts"),
        ("ranks_per_node: 8\ngpus_per_node: 4", "ranks_per_node=8 is more than gpus_per_node=4"),
        ("[1]", "expected a mapping with keys account, partition"),
        ("a: b: c", "not valid YAML"),
    ],
)
def test_site_settings_that_cannot_be_used_are_refused_by_name(text, words, tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        load_site(path)
    assert str(path) in str(error.value)


def test_site_settings_come_from_home_or_the_file_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_site(None) == Site()
    (tmp_path / ".config/hybridflow").mkdir(parents=True)
    (tmp_path / ".config/hybridflow/site.yaml").write_text("account: nlp")
    assert load_site(None) == Site(account="nlp")
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert load_site(tmp_path / "empty.yaml") == Site()
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read"):
        load_site(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("limit", "expected"),
    # sbatch(1): minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, ….
    [("90", 5400), ("90:30", 5430), ("2:00:00", 7200), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:5", 86405)],
)
def test_time_limits_in_slurms_words(limit, expected):
    assert seconds_of(limit, "time") == expected


@pytest.mark.parametrize("limit", ["", "1h", "1:2:3:4", "-5", "1-", "0", "0:00", "UNLIMITED", "1 2"])
def test_other_time_limits_are_refused(limit):
    with pytest.raises(ConfigError, match="^--time: "):
        seconds_of(limit, "--time")


def test_a_job_has_time_beside_what_it_takes_to_stop():
    with pytest.raises(ConfigError, match="no time limit: give --time"):
        time_limit(Site())
    with pytest.raises(ConfigError, match="time limit 3 is 180 s, and the job is told to stop 120 s before"):
        time_limit(Site(time="3"))
    assert time_limit(Site(time="3:01")) == "3:01"


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"), [(None, 16, (4, 4)), ("4", 16, (4, 4)), ("2-4", 16, (2, 4)), ("5", 16, (5, 5))]
)
def test_nodes_of_a_job(nodes, ranks, expected):
    assert node_range(nodes, ranks, 4) == expected


@pytest.mark.parametrize(
    ("nodes", "words"),
    [(None, "do not fill nodes of 4 ranks"), ("3", "12 ranks, and the recipe has cluster.ranks=14; give --nodes 4")],
)
def test_ranks_that_do_not_fit_their_nodes_are_refused(nodes, words):
    with pytest.raises(LayoutError, match=words):
        node_range(nodes, 14, 4)


@pytest.mark.parametrize("nodes", ["0", "4-3", "a", "1-2-3", "-4", "2,3"])
def test_other_numbers_of_nodes_are_refused(nodes):
    with pytest.raises(ConfigError, match="--nodes .*: expected a number of nodes"):
        node_range(nodes, 16, 4)


@pytest.fixture
def on_a_login_node(tmp_path, monkeypatch):
    """A working directory, a home without settings, and an sbatch that notes what it was given."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    put_program(tmp_path / "bin/sbatch", 'printf "%s\\n" "$@" > sbatch.seen; echo "4711;alps"')
    return tmp_path


QUICK = ["launch", "slurm", "quickstart", "trainer.steps=3", "--time", "30"]


def test_printing_checks_all_and_writes_nothing(on_a_login_node, capsys):
    assert cli.main([*QUICK, "--print"]) == 0
    printed = capsys.readouterr().out
    run = on_a_login_node / "runs/quickstart/launch/0001"
    assert f"\nset -- {run}/recipe.yaml\n" in printed and f"\nexport PYTHONPATH={run}/code$" in printed
    assert "\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\n" in printed and printed.endswith(shipped_body())
    assert sorted(path.name for path in on_a_login_node.iterdir()) == ["bin"]


def test_a_checkpoint_is_not_compared_where_torch_is_missing(on_a_login_node, monkeypatch, capsys):
    monkeypatch.setattr("hybridflow.recipe.run_dir.latest_step", lambda run_dir: 3)
    # Raises ModuleNotFoundError, as its import of torch does there.
    monkeypatch.setitem(sys.modules, "hybridflow.checkpoint.store", None)
    assert cli.main([*QUICK, "--print"]) == 0
    assert "warning: latest checkpoint not compared with the recipe: " in capsys.readouterr().err


def test_a_command_that_the_job_will_not_find_is_warned_of(on_a_login_node, monkeypatch, capsys):
    says = "the command hybridflow is not on PATH"
    monkeypatch.setenv("PATH", f"{on_a_login_node / 'bin'}:/usr/bin:/bin")
    assert cli.main([*QUICK, "--print"]) == 0 and says in capsys.readouterr().err
    (on_a_login_node / "site.yaml").write_text("setup: [source venv/bin/activate]")
    assert cli.main([*QUICK, "--print", "--site", "site.yaml"]) == 0 and says not in capsys.readouterr().err
    put_program(on_a_login_node / "bin/hybridflow", "exit 0")
    assert cli.main([*QUICK, "--print"]) == 0 and says not in capsys.readouterr().err


def test_a_container_sees_the_paths_of_the_recipe_and_the_cache_of_hugging_face(on_a_login_node, capsys, monkeypatch):
    place = on_a_login_node / "else where"
    for name in ("data", "more", "hub", "work"):
        (place / name).mkdir(parents=True)
    monkeypatch.chdir(place / "work")
    monkeypatch.setenv("HF_HOME", str(place / "hub"))
    (place / "site.yaml").write_text("container: {kind: pyxis, image: flow.sqsh, mounts: [/own]}")
    sources = f"[{{path: '{place}/data/*.jsonl'}}, {{path: '{place}/more'}}]"
    for name in ("data/a", "more/b", "data/held_out"):
        (place / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    data = [
        "data.train=null",
        "data.arithmetic=null",
        f"data.mixture={sources}",
        f"data.held_out={place}/data/held_out.jsonl",
    ]
    assert cli.main([*QUICK, *data, "--site", str(place / "site.yaml"), "--print"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("srun_options=")]
    (mounts,) = re.findall(r"--container-mounts=([^']*)'", line)
    assert mounts.split(",") == [
        f"{path}:{path}" for path in (*(place / n for n in ("work", "hub", "data", "more")), "/own")
    ]


def test_a_launch_keeps_what_the_job_runs_and_submits_that(on_a_login_node, capsys):
    assert cli.main([*QUICK, "--parsable", "--partition", "debug"]) == 0
    assert capsys.readouterr().out == "4711\n"
    folder = on_a_login_node / "runs/quickstart/launch/0001"
    parsable, *options, batch = (on_a_login_node / "sbatch.seen").read_text().split()
    assert (parsable, batch) == ("--parsable", str(folder / "batch.sh"))
    # As directives alone SBATCH_PARTITION and the like would rule over them.
    lines = (folder / "batch.sh").read_text().splitlines()
    assert [f"#SBATCH {option}" for option in options] == [line for line in lines if line.startswith("#SBATCH")]
    assert {"--partition=debug", "--time=30"} <= set(options)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("about.json", "batch.sh", "code", "job_id", "recipe.yaml", "site.yaml")
    ]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["0001"]
    assert load_recipe(folder / "recipe.yaml") == load_recipe("quickstart", ["trainer.steps=3"])
    assert (folder / "job_id").read_text() == "4711\n"
    assert yaml.safe_load((folder / "site.yaml").read_text())["partition"] == "debug"
    about = json.loads((folder / "about.json").read_text())
    assert about["overrides"] == ["trainer.steps=3"] and "torch" in about["packages"]
    assert cli.main(QUICK) == 0
    assert re.fullmatch(r"job 4711, log .*/slurm-4711.out, launched as .*/0002\n", capsys.readouterr().out)


def test_what_a_job_settles_stays_open_in_the_recipe_that_it_is_launched_with(on_a_login_node, capsys):
    """A fallback has other ranks, and the GPUs of the job may take larger micro-batches."""
    open_keys = ["cluster.ranks=4", "actor.update={pp: 4, layers: auto}", "actor.rollout={dp: 4}", "model.num_layers=5"]
    fallback = "fallbacks=[{ranks: 2, overrides: ['actor.update.pp=2', 'actor.rollout={dp: 2}']}]"
    written = yaml.safe_load(find_recipe("quickstart").read_text())
    for section in ("actor", "critic", "reference"):
        written.pop(section, None)
    written["trainer"].pop("micro_batch_tokens", None)
    (on_a_login_node / "own.yaml").write_text(yaml.safe_dump(written))
    assert cli.main(["launch", "slurm", "own.yaml", *open_keys, fallback, "--time", "30"]) == 0, capsys.readouterr().err
    kept = on_a_login_node / "runs/quickstart/launch/0001/recipe.yaml"
    values, recipe = yaml.safe_load(kept.read_text()), load_recipe(kept)
    assert values["actor"]["update"]["layers"] == "auto" and "layout" not in values["critic"]
    assert "micro_batch_tokens" not in values["trainer"] and "trainer.micro_batch_tokens" in recipe.defaults
    assert recipe.critic.layout.layers == recipe.actor.update.layers == (1, 1, 2, 1)
    smaller = recipe_for_ranks(recipe, kept, (), 2)
    assert (smaller.critic.layout.pp, sum(smaller.actor.update.layers)) == (2, 5)


def test_a_job_that_is_launched_from_another_inherits_nothing_of_it(on_a_login_node, monkeypatch):
    put_program(on_a_login_node / "bin/sbatch", "env > environ.seen; echo 4711")
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_MEM_PER_CPU", "SRUN_CPUS_PER_TASK", "SLURM_CONF"):
        monkeypatch.setenv(name, "7")
    assert cli.main(QUICK) == 0
    seen = {line.partition("=")[0] for line in (on_a_login_node / "environ.seen").read_text().splitlines()}
    assert [name for name in seen if name.startswith(("SLURM", "SRUN"))] == ["SLURM_CONF"] and "PATH" in seen


def test_ranks_that_the_actors_layout_gives_need_not_fill_the_nodes(on_a_login_node, capsys):
    (on_a_login_node / "site.yaml").write_text('time: "24:00:00"\ngpus_per_node: 8\n')
    written = yaml.safe_load(find_recipe("quickstart").read_text())
    del written["cluster"]
    (on_a_login_node / "own.yaml").write_text(yaml.safe_dump(written))
    given = ["plan", "job", "own.yaml", "--site", "site.yaml", "--script"]
    assert cli.main(given) == 0, capsys.readouterr().err
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\n" in capsys.readouterr().out


def test_the_copy_of_the_code_is_a_whole_package_that_goes_before_the_installed_one(on_a_login_node):
    assert cli.main(QUICK) == 0
    code = on_a_login_node / "runs/quickstart/launch/0001/code"
    assert not list(code.rglob("__pycache__"))
    names = ["hybridflow", "hybridflow.launch", "hybridflow.trainer.trainer"]
    program = "import importlib.util as u, sys\nfor name in sys.argv[1:]: print(u.find_spec(name).origin)"
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        env={**os.environ, "PYTHONPATH": str(code)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(line.startswith(f"{code}/hybridflow/") for line in done.stdout.split()) and len(done.stdout.split()) == 3
    kernels = "from hybridflow.rollout.cpu import kernels\nprint(kernels.__file__, kernels.find_kernels())"
    done = subprocess.run(
        [sys.executable, "-c", kernels], env={**os.environ, "PYTHONPATH": str(code)}, capture_output=True, text=True
    )
    assert str(code) in done.stdout and "other sources" not in done.stdout, done.stdout
    for name in ("launch/recipes/grpo.yaml", "slurm/train.sbatch", "rollout/cpu/kernels.c"):
        assert (code / "hybridflow" / name).is_file()
    built, copied = (Path(root).glob("rollout/_kernels*") for root in (hybridflow.__path__[0], code / "hybridflow"))
    assert sorted(path.name for path in copied) == sorted(path.name for path in built)


def test_installed_runs_what_is_installed(on_a_login_node):
    assert cli.main([*QUICK, "--installed"]) == 0
    folder = on_a_login_node / "runs/quickstart/launch/0001"
    assert not (folder / "code").exists() and "PYTHONPATH" not in (folder / "batch.sh").read_text().split("set --")[0]


def test_what_slurm_refuses_is_said_with_a_remedy_and_leaves_no_launch(on_a_login_node, capsys):
    said = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    put_program(on_a_login_node / "bin/sbatch", f"echo '{said}' >&2; exit 1")
    assert cli.main(QUICK) == 2
    told = capsys.readouterr().err
    assert "Slurm refuses the job: error: Batch job submission failed: Invalid account" in told and "sacctmgr" in told
    assert list((on_a_login_node / "runs/quickstart/launch").iterdir()) == []


def test_a_launch_is_kept_where_the_controller_did_not_answer_since_the_job_may_be_there(on_a_login_node, capsys):
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    put_program(on_a_login_node / "bin/sbatch", f"echo '{said}' >&2; exit 1")
    assert cli.main(QUICK) == 1
    assert "Socket timed out on send/recv operation; see `squeue --me` whether the job is" in capsys.readouterr().err
    assert (on_a_login_node / "runs/quickstart/launch/0001/code").is_dir()


def test_without_sbatch_the_error_says_what_else_there_is(on_a_login_node, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(on_a_login_node / "home"))
    assert cli.main(QUICK) == 2
    assert "no sbatch on this machine; launch from a login node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "no time limit"),
        (
            ["--time", "30", "--nodes", "3"],
            "3 nodes × 4 = 12 ranks, but quickstart's layouts need 4; these fit: cluster.ranks=12 actor.update.dp=6",
        ),
        (["--time", "30", "cluster.ranks_per_node=3"], "cluster.ranks=4 do not fill nodes of 3 ranks"),
        (["--time", "30", "--site", "site.yaml"], "cluster.ranks_per_node=4 with gpus_per_node=2"),
        (["--time", "30", "--partition", "a\nb"], "--partition: 'a\\nb' has the character '\\n'"),
        (["--time", "30", 'run_dir="a\\nb"'], "run_dir: 'a\\nb' has the character"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_submitted(words, expected, on_a_login_node, capsys):
    (on_a_login_node / "site.yaml").write_text("gpus_per_node: 2\n")
    more = ["cluster.ranks_per_node=4"] if "--site" in words else []
    assert cli.main(["launch", "slurm", "quickstart", *more, *words]) == 2
    assert expected in capsys.readouterr().err
    assert not (on_a_login_node / "sbatch.seen").exists() and not (on_a_login_node / "runs").exists()


def test_a_range_of_nodes_needs_fallbacks(on_a_login_node, capsys):
    given = ["launch", "slurm", "quickstart", "cluster.ranks_per_node=2", "--nodes", "1-2", "--time", "30", "--print"]
    assert cli.main(given) == 2
    assert (
        "1 node × 2 = 2 ranks, but quickstart's layouts need 4; these fit: cluster.ranks=2" in capsys.readouterr().err
    )
    layouts = ["actor.update={tp: 2}", "actor.rollout={dp: 2}", "critic.layout={pp: 2}"]
    fallbacks = json.dumps([{"ranks": 2, "overrides": layouts}])
    assert cli.main([*given, f"fallbacks={fallbacks}"]) == 0
    assert "#SBATCH --nodes=1-2\n" in capsys.readouterr().out
    # Without ranks_per_node the recipe's ranks fill the most nodes.
    dealt = [*given[:3], *given[4:], f"fallbacks={fallbacks}"]
    assert cli.main(dealt) == 0
    assert "#SBATCH --nodes=1-2\n#SBATCH --ntasks-per-node=2\n" in capsys.readouterr().out


def test_a_recipe_without_ranks_fills_the_nodes(on_a_login_node, capsys):
    write_config(on_a_login_node / "model")
    (on_a_login_node / "site.yaml").write_text('time: "24:00:00"\ngpus_per_node: 4\n')
    given = ["launch", "slurm", "grpo", "model=model", "data=d.jsonl", "data.held_out=d.jsonl", "--site", "site.yaml"]
    for nodes, ranks in ((["--nodes", "2"], 8), ([], 4)):
        assert cli.main([*given, *nodes]) == 0
        kept = sorted(on_a_login_node.glob("runs/grpo/launch/*/recipe.yaml"))[-1]
        recipe = load_recipe(kept)
        assert (recipe.cluster.ranks, recipe.cluster.ranks_per_node, recipe.actor.update.dp) == (ranks, 4, ranks)
        assert f"#SBATCH --nodes={ranks // 4}\n#SBATCH --ntasks-per-node=4\n" in (kept.parent / "batch.sh").read_text()
    capsys.readouterr()
    assert cli.main([*given, "--nodes", "1-2"]) == 2
    assert "1 node × 4 = 4 ranks, but grpo's layouts need 8; these fit: cluster.ranks=4" in capsys.readouterr().err
    (on_a_login_node / "site.yaml").write_text('time: "24:00:00"\n')
    assert cli.main([*given, "--nodes", "3", "--print"]) == 0
    assert "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=1\n" in capsys.readouterr().out


def test_ranks_are_dealt_to_the_nodes_and_missing_settings_are_told(on_a_login_node, capsys):
    assert cli.main([*QUICK, "--nodes", "2", "--print"]) == 0
    found = capsys.readouterr()
    assert "\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n" in found.out
    assert "no site settings in ~/.config/hybridflow/site.yaml: the job asks for no GPUs" in found.err
    (on_a_login_node / "home/.config/hybridflow").mkdir(parents=True)
    (on_a_login_node / "home/.config/hybridflow/site.yaml").write_text("gpus_per_node: 0\n")
    assert cli.main([*QUICK, "--nodes", "2", "--print"]) == 0
    assert "no site settings" not in capsys.readouterr().err


def test_a_plan_is_that_of_the_job_on_its_nodes(on_a_login_node, capsys):
    write_config(on_a_login_node / "model")
    (on_a_login_node / "site.yaml").write_text('time: "24:00:00"\ngpus_per_node: 4\n')
    given = ["plan", "job", "grpo", "model=model", "data=d.jsonl", "data.held_out=d.jsonl", "--site", "site.yaml"]
    for more, ranks in ((["--nodes", "2"], 8), (["--nodes", "2", "--script"], 8), (["--script"], 4), ([], 1)):
        assert cli.main([*given, *more]) == 0
        printed = capsys.readouterr().out
        assert f"actor.update tp1.pp1.dp{ranks} " in printed
        assert (f"--nodes={ranks // 4}\n#SBATCH --ntasks-per-node=4\n" in printed) is ("--script" in more)
    assert cli.main([*given, "--time", "1:00:00"]) == 2
    assert "--time is for the batch file; give --script too" in capsys.readouterr().err


def test_memory_is_checked_against_the_sites_gpus(on_a_login_node, capsys):
    (on_a_login_node / "site.yaml").write_text('time: "24:00:00"\ngpus_per_node: 8\ngpu_memory_gb: 40\n')
    given = ["launch", "slurm", "ppo-70b", "--site", "site.yaml", "--print"]
    assert cli.main(given) == 2
    assert "GB in its update phase, a GPU has 40.0 GB (gpu_memory_gb in the site settings)" in capsys.readouterr().err
    (on_a_login_node / "site.yaml").write_text('time: "24:00:00"\ngpus_per_node: 8\ngpu_memory_gb: 80\n')
    assert cli.main(given) == 0
    found = capsys.readouterr()
    assert "#SBATCH --nodes=64\n#SBATCH --ntasks-per-node=8\n" in found.out
    assert found.err.count("warning") == 1 and "data.train='data/train.jsonl': no such file" in found.err


def test_tensor_parallel_groups_over_nodes_are_warned_of(on_a_login_node, capsys):
    assert cli.main([*QUICK, "cluster.ranks_per_node=1", "--print"]) == 0
    told = capsys.readouterr().err
    assert "hybridflow: warning: actor.update, reference: tensor-parallel groups of 2 reach across nodes" in told


def test_a_launch_that_cannot_be_kept_leaves_nothing(tmp_path):
    recipe = load_recipe("quickstart", [f"run_dir={tmp_path}"])
    kept = tmp_path / "launch/0001"
    (kept / "batch.sh").parent.mkdir(parents=True)
    (kept / "batch.sh").write_text("another's")
    with pytest.raises(WriteError, match="0001: the launch cannot be kept there"):
        snapshot.write_snapshot(kept, recipe, Site(), "mine", source="a", overrides=(), with_code=False)
    assert [path.name for path in kept.parent.iterdir()] == ["0001"]
    assert (kept / "batch.sh").read_text() == "another's" and snapshot.next_folder(tmp_path) == tmp_path / "launch/0002"


def test_state_of_a_job():
    line = (
        "JobId=3 JobName=a b UserId=ada(1) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=1 "
        "ExitCode=75:0 RunTime=00:01 NodeList=n[1-2] BatchHost=n1 Comment=JobState=RUNNING"
    )

    def state_of(text):
        return job_state(parse_records(text))

    state = state_of(line)
    assert state_of("slurm_load_jobs error: Invalid job id specified") is None
    assert (state.status, state.is_over, str(state)) == (75, True, "FAILED on n[1-2] (NonZeroExitCode)")
    assert state_of(line.replace("75:0", "0:9")).status == 137
    assert not state_of(line.replace("JobState=FAILED", "JobState=PENDING", 1)).is_over


def put_scontrol(folder, turns):
    """Tell of a job that runs and then is done; before each answer the shell does what that turn says."""
    cases = "\n".join(f"{number}) {turn};;" for number, turn in enumerate(turns, 1))
    end = f"[ $turn -lt {len(turns)} ] && state=RUNNING || state=COMPLETED"
    put_program(
        folder / "bin/scontrol",
        f"echo >> turns; turn=$(wc -l < turns)\ncase $turn in\n{cases}\nesac\n{end}\n"
        'echo "JobId=4711 JobState=$state Reason=None ExitCode=0:0 NodeList=n1"',
    )


def test_a_log_that_is_begun_anew_is_followed_from_its_beginning(on_a_login_node, monkeypatch, capsysbinary):
    monkeypatch.setattr(submit, "_POLL_S", 0.01)
    log = "runs/quickstart/slurm-4711.out"
    turns = [f"echo a long first line > {log}", f"echo more >> {log}", f"echo anew > {log}", f"echo end >> {log}"]
    put_scontrol(on_a_login_node, turns)
    assert cli.main([*QUICK, "--follow", "--parsable"]) == 0
    assert capsysbinary.readouterr().out == b"4711\na long first line\nmore\nanew\nend\n"


def test_a_job_that_could_write_no_log_is_explained(on_a_login_node, capsys):
    answer = 'echo "JobId=4711 JobState={} Reason=x ExitCode=0:53 NodeList={}"'
    put_program(on_a_login_node / "bin/scontrol", answer.format("FAILED", "n1"))
    assert cli.main([*QUICK, "--follow"]) != 0
    assert "n1 cannot write there" in capsys.readouterr().err
    # One that was cancelled before it began has none, either.
    put_program(on_a_login_node / "bin/scontrol", answer.format("CANCELLED", "(null)"))
    assert cli.main([*QUICK, "--follow"]) != 0
    assert "cannot write there" not in capsys.readouterr().err


def test_ctrl_c_ends_following_and_says_what_becomes_of_the_job(on_a_login_node, capsys):
    put_scontrol(on_a_login_node, ["kill -INT $PPID", "true"])
    # What runs in the background of a shell ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main([*QUICK, "--follow", "--parsable"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    last = capsys.readouterr().err.splitlines()[-2]
    log = on_a_login_node / "runs/quickstart/slurm-4711.out"
    assert last == f"hybridflow: job 4711 goes on; `scancel 4711` ends it, and its log is {log}"


def test_local_and_mpi_print_what_they_would_start(capsys, tmp_path):
    assert cli.main(["launch", "local", "quickstart", "seed=2", "--print"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and " RANK=3 LOCAL_RANK=3 " in lines[3]
    assert lines[0].endswith(" -m hybridflow train quickstart seed=2")
    assert cli.main(["launch", "mpi", "quickstart", "seed=2", "--resume", "--print"]) == 0
    printed = capsys.readouterr().out
    assert (
        shlex.split(printed) == f"mpirun -n 4 {sys.executable} -m hybridflow train quickstart seed=2 --resume".split()
    )
    hosts = tmp_path / "hosts"
    hosts.write_text("n1\n")
    assert mpi_command(["train"], 2, hosts)[:5] == ["mpirun", "-hostfile", str(hosts), "-n", "2"]
    with pytest.raises(ConfigError, match="no such file"):
        mpi_command(["train"], 2, tmp_path / "none")

"""A job that was killed goes on as if nothing had happened: the same numbers, the same weights, the same prompts."""

import json
import os
import resource
import shutil
import signal

import pytest

from hybridflow.checkpoint.manifest import digest
from hybridflow.checkpoint.store import latest_step
from hybridflow.data.pieces import PieceTokenizer, train_tokenizer
from hybridflow.trainer.checkpoints import Checkpoints
from tests.e2e.commands import fork_ranks, kill_in_step, lasting_metrics, run_well, write_recipe

RUN = ["train", "tiny.yaml", "trainer.steps=4", "trainer.save_every=2", "trainer.validate_every=3"]
RUN += ["actor.optimizer.schedule=cosine", "actor.optimizer.min_lr=1e-3"]
GRPO = RUN
PPO = [
    *RUN,
    *("algorithm=ppo", "cluster.ranks=4", "actor.update={tp: 2, dp: 2}", "actor.rollout={dp: 4}"),
    *("critic.layout={pp: 2, dp: 2}", "critic.optimizer.lr=1e-2", "loss.epochs=2"),
    *("kl.coef=0.1", "kl.target=0.01", "kl.horizon=20"),
]

# Notes each problem that is scored, per rank.
NOTING = """
import os
def score(prompt, response, answer):
    with open(f"prompts-{os.environ['RANK']}", "a") as file:
        file.write(prompt + "\\n")
    return float(sum(map(ord, prompt + response)) % 3)
"""


def write(folder):
    write_recipe(folder)
    (folder / "rewards.py").write_text(NOTING)


def prompts(folder, num_ranks):
    """What each rank scored in training, in order."""
    held_out = {json.loads(line)["prompt"] for line in (folder / "data/held_out.jsonl").read_text().splitlines()}
    files = [folder / f"prompts-{rank}" for rank in range(num_ranks)]
    noted = [file.read_text().splitlines() if file.exists() else [] for file in files]
    return [[prompt for prompt in prompts if prompt not in held_out] for prompts in noted]


def kill_in_step_4(rank):
    """Rank 1 dies after step 3 was recorded, before step 4 is."""
    if rank == 1:
        kill_in_step(4)


def kill_while_writing_step_4(rank):
    """Rank 1 dies when it has written some of the last checkpoint, in the background."""
    pwrite, num_calls = os.pwrite, 0

    def write(file, *rest):
        nonlocal num_calls
        num_calls += "step_000004" in os.readlink(f"/proc/self/fd/{file}")
        if rank == 1 and num_calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(file, *rest)

    os.pwrite = write


def reused(folder):
    """Step -> share of its responses that came from the log of a killed job."""
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["rollout/reused"] for row in rows if "rollout/reused" in row}


def weights(folder):
    step, reference = (folder / "run/checkpoints" / name for name in ("step_000004", "reference"))
    files = [*step.rglob("*.safetensors"), *reference.glob("*.safetensors")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


RUNS = {"ppo": (PPO, 4, kill_in_step_4), "grpo": (GRPO, 2, kill_while_writing_step_4)}
GRPO_ALONE = pytest.mark.parametrize("runs", ["grpo"], indirect=True)


@pytest.fixture(scope="module", params=[pytest.param("ppo", marks=pytest.mark.slow), "grpo"])
def runs(request, tmp_path_factory):
    """A run in one go and one that was killed in step 4, both in folders of their own; command and number of ranks."""
    name, (argv, num_ranks, hook) = request.param, RUNS[request.param]
    whole, killed = tmp_path_factory.mktemp(f"{name}-whole"), tmp_path_factory.mktemp(f"{name}-killed")
    write(whole)
    write(killed)
    run_well(argv, whole, num_ranks=num_ranks)
    done = fork_ranks(argv, killed, num_ranks=num_ranks, hook=hook)
    assert done.codes[1] == -signal.SIGKILL and 0 not in done.codes, done.err
    return whole, killed, argv, num_ranks


def test_resumed_run_is_the_same_bit_for_bit(runs, tmp_path):
    whole, killed, argv, num_ranks = runs
    folder = tmp_path / "resumed"
    shutil.copytree(killed, folder)
    assert latest_step(folder / "run") == 2
    assert len(lasting_metrics(folder / "run")) >= 3  # the killed job had gone on
    for path in folder.glob("prompts-*"):
        path.unlink()

    done = run_well([*argv, "--resume"], folder, num_ranks=num_ranks)
    assert "resumed from run/checkpoints/step_000002" in done.out and "warm start" not in done.out
    assert lasting_metrics(folder / "run") == lasting_metrics(whole / "run")
    assert all(row["actor/grad_norm"] > 0 for row in lasting_metrics(whole / "run"))
    # All that the killed job had sampled after its checkpoint, of weights that come about again.
    assert reused(folder) == {3: 1.0, 4: 1.0} and reused(whole) == {}
    assert not list((folder / "run/rollouts/log").iterdir())
    assert len(weights(whole)) == num_ranks * (3 if num_ranks == 4 else 2)
    assert weights(folder) == weights(whole)
    summaries = [json.loads((place / "run/summary.json").read_text()) for place in (folder, whole)]
    lasting = ("steps", "score_before_rl", "score_after_rl")
    assert [[summary[name] for name in lasting] for summary in summaries] == [
        [summaries[1][name] for name in lasting]
    ] * 2
    assert summaries[0].keys() == summaries[1].keys() >= {"tokens_per_s", "control_overhead_share"}

    in_one_go, resumed = prompts(whole, num_ranks), prompts(folder, num_ranks)
    assert resumed == [noted[len(noted) // 2 :] for noted in in_one_go]
    drawn = [prompt for noted in in_one_go for prompt in noted]
    group_size = 2
    assert len(drawn) == 4 * 8 and len(set(drawn)) * group_size == len(drawn)


OTHERWISE = {
    "ppo": [
        (8, "actor.update={pp: 2, dp: 4}", "actor.rollout={tp: 2, dp: 4}", "critic.layout={tp: 2, pp: 2, dp: 2}"),
        (
            2,
            "actor.update={dp: 2}",
            "actor.rollout={tp: 2}",
            "critic.layout={pp: 2}",
            "critic.optimizer.distributed=false",
        ),
        (
            4,
            "actor.ranks=[2, 3]",
            "actor.update={tp: 2}",
            "actor.rollout={dp: 2}",
            "critic.ranks=[0]",
            "critic.layout={}",
        ),
    ],
    "grpo": [
        (4, "actor.update={pp: 2, dp: 2}", "actor.rollout={tp: 2, dp: 2}", "trainer.micro_batch_tokens=40"),
        (1, "actor.update={}", "actor.rollout={}", "actor.optimizer.distributed=false", "actor.offload=true"),
    ],
}
"""Algorithm -> numbers of ranks, and what of the recipe changes with them."""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_resumed_in_another_layout_the_run_takes_the_same_way(runs, number, tmp_path):
    whole, killed, argv, _ = runs
    ways = OTHERWISE["ppo" if argv is PPO else "grpo"]
    if number >= len(ways):
        pytest.skip("this algorithm has fewer cases")
    num_ranks, *changes = ways[number]
    folder = tmp_path / "resumed"
    shutil.copytree(killed, folder)
    for path in folder.glob("prompts-*"):
        path.unlink()

    done = run_well([*argv, f"cluster.ranks={num_ranks}", *changes, "--resume"], folder, num_ranks=num_ranks)
    assert "resumed from run/checkpoints/step_000002" in done.out
    rows = [lasting_metrics(place / "run") for place in (folder, whole)]
    assert [row["step"] for row in rows[0]] == [1, 2, 3, 4]
    for found, expected in zip(*rows, strict=True):
        for name in found.keys() & expected.keys():
            if not name.startswith("reshard/"):
                assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    # In another layout the weights of step 3 come out differently in their last bits.
    assert reused(folder) == {3: 1.0}
    drawn = [
        sorted(prompt for noted in prompts(place, count) for prompt in noted)
        for place, count in ((folder, num_ranks), (whole, 4 if argv is PPO else 2))
    ]
    assert len(drawn[0]) == 2 * 8 and set(drawn[0]) < set(drawn[1])
    assert latest_step(folder / "run") == 4


def fill_the_disk_in_step(step):
    """No file of rank 1 can grow any more once the step has begun to be saved."""

    def hook(rank):
        save = Checkpoints.save

        def save_without_room(self, number, *others):
            if rank == 1 and number == step:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            save(self, number, *others)

        Checkpoints.save = save_without_room

    return hook


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(2, id="within"), pytest.param(4, id="at the end")])
def test_a_checkpoint_that_cannot_be_written_ends_the_job(step, tmp_path):
    write(tmp_path)
    argv = [*GRPO, f"trainer.save_every={step - 1}", "rollout.archive=false"]
    done = fork_ranks(argv, tmp_path, hook=fill_the_disk_in_step(step))
    done.complains_once(
        "hybridflow: rank 1 on ",
        f"run/checkpoints/step_00000{step}.tmp/actor/rank-00001.safetensors: cannot be written",
        "File too large",
    )
    assert set(done.codes) == {4}
    assert latest_step(tmp_path / "run") == step - 1
    done = run_well([*argv, "--resume"], tmp_path)
    assert latest_step(tmp_path / "run") == 4, done.out
    assert not list((tmp_path / "run/checkpoints").glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("runs", ["ppo"], indirect=True)
def test_kl_coefficient_moved(runs):
    coefficients = [row["kl/coef"] for row in lasting_metrics(runs[0] / "run")]
    assert len(set(coefficients)) == 4, coefficients


@GRPO_ALONE
def test_run_that_is_done_stays_as_it_is(runs, tmp_path):
    whole, _, argv, num_ranks = runs
    folder = tmp_path / "again"
    shutil.copytree(whole, folder)
    before = json.loads((folder / "run/summary.json").read_text())
    done = run_well([*argv, "trainer.steps=3", "--resume"], folder, num_ranks=num_ranks)
    assert "4 steps are done, and trainer.steps=3: nothing is left to train" in done.out and "step 5" not in done.out
    assert json.loads((folder / "run/summary.json").read_text()) == before
    assert lasting_metrics(folder / "run") == lasting_metrics(whole / "run")
    assert weights(folder) == weights(whole)


@GRPO_ALONE
def test_new_run_in_a_used_place_is_refused(runs):
    whole, _, argv, num_ranks = runs
    done = fork_ranks(argv, whole, num_ranks=num_ranks)
    done.complains_once("run: holds a run with a checkpoint of step 4; add --resume", "set run_dir to another")
    assert 2 in done.codes and 3 not in done.codes
    assert len(lasting_metrics(whole / "run")) == 4


@GRPO_ALONE
def test_another_recipe_is_refused(runs):
    whole, _, argv, num_ranks = runs
    done = fork_ranks([*argv, "trainer.global_batch_size=16", "--resume"], whole, num_ranks=num_ranks)
    says = "run: the checkpoint was written with trainer.global_batch_size=8, the recipe now has 16"
    done.complains_once(says, "another run_dir")
    assert set(done.codes) == {3}


@GRPO_ALONE
def test_another_tokenizer_in_the_same_file_is_refused(runs, tmp_path):
    """It has the tokens of the first under other ids, so that nothing else would tell."""
    whole, _, argv, num_ranks = runs
    folder = tmp_path / "again"
    shutil.copytree(whole, folder)
    tokenizer = folder / "run/tokenizer.model"
    before = PieceTokenizer(tokenizer)
    others = str.maketrans("0123456789", "1234567890")
    text = "".join(json.loads(line)["prompt"] for line in (folder / "data/train.jsonl").read_text().splitlines())
    lines = [text[begin : begin + 50].translate(others) for begin in range(0, len(text), 50)]
    after = train_tokenizer(lines, path=tokenizer, vocab_size=before.vocab_size)
    assert after.vocab_size == before.vocab_size and after.pieces() != before.pieces()
    done = fork_ranks([*argv, "trainer.steps=5", "--resume"], folder, num_ranks=num_ranks)
    copy = folder / "run/checkpoints/step_000004/actor/assets/tokenizer.model"
    done.complains_once("run/tokenizer.model: is another tokenizer than when", str(copy.relative_to(folder)))
    assert set(done.codes) == {3}
    shutil.copy(copy, tokenizer)
    run_well([*argv, "trainer.steps=4", "--resume"], folder, num_ranks=num_ranks)


@pytest.mark.slow
def test_other_problems_in_the_same_file_are_refused(tmp_path):
    """With one more the order of all is another: some would come twice, others not at all."""
    write(tmp_path)
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) + "\n" for number in range(20)]
    for name in ("train", "held_out"):
        (tmp_path / f"data/{name}.jsonl").write_text("".join(rows))
    argv = [*GRPO, "data.arithmetic=null"]
    run_well([*argv, "trainer.steps=2"], tmp_path)
    (tmp_path / "data/train.jsonl").write_text("".join([*rows, rows[0]]))
    done = fork_ranks([*argv, "--resume"], tmp_path)
    done.complains_once("data/train.jsonl: holds other problems than when", "step_000002", "restore the file")
    assert set(done.codes) == {3}
    # What the run has trained is in its checkpoints, too.
    (tmp_path / "run/tokenizer.model").unlink()
    done = fork_ranks([*argv, "--resume"], tmp_path)
    copy = tmp_path / "run/checkpoints/step_000002/actor/assets/tokenizer.model"
    done.complains_once("run/tokenizer.model: missing", str(copy.relative_to(tmp_path)))
    assert set(done.codes) == {2} and copy.is_file()


def test_nothing_to_resume_from_is_a_new_run(tmp_path):
    write(tmp_path)
    # What a run of other settings has left that was killed before its first checkpoint.
    (tmp_path / "run/checkpoints/step_000001.tmp").mkdir(parents=True)
    (tmp_path / "run/tokenizer.model").write_bytes(b"stale")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    done = run_well([*GRPO, "trainer.steps=1", "--resume"], tmp_path)
    assert "warm start" in done.out and "step 1/1" in done.out
    assert len(lasting_metrics(tmp_path / "run")) == 1 and latest_step(tmp_path / "run") == 1


def believed(path, **changes):
    """Change ``job.json``, whose hash then fits."""
    body = {**json.loads(path.read_text()), **changes}
    del body["sha256"]
    path.write_text(json.dumps({"sha256": digest(body), **body}))


def elsewhere(run_dir):
    """A whole checkpoint lies outside the run's, and the job file leads there."""
    job = run_dir / "checkpoints/step_000001/job.json"
    shutil.copytree(run_dir / "checkpoints/step_000001", run_dir.parent / "elsewhere")
    roles = json.loads(job.read_text())["roles"]
    believed(job, roles={**roles, "actor": {**roles["actor"], "directory": "../../elsewhere/actor"}})


def state(**changes):
    def change(run_dir):
        job = run_dir / "checkpoints/step_000001/job.json"
        believed(job, state={**json.loads(job.read_text())["state"], **changes})

    return change


def belongs_to_nobody(run_dir):
    os.chown(run_dir, 65534, 65534)


ATTACKS = {
    "elsewhere": (elsewhere, 3, "job.json: is malformed: ValueError: actor lies in '../../elsewhere/actor'"),
    "latest": (lambda path: (path / "checkpoints/latest").write_text("9" * 6000), 3, "latest: found '6000 bytes"),
    "metrics": (lambda path: (path / "metrics.jsonl").write_bytes(b"\xff\x1b[31m\n"), 3, "metrics.jsonl, line 1"),
    "place": (state(next_prompt_index="7"), 3, "job.json: is malformed: TypeError"),
    "recipe": (state(recipe=[]), 3, "job.json: is malformed: AttributeError"),
    "rollouts": (state(rollouts=[]), 3, "job.json: is malformed: AttributeError"),
    "owner": (belongs_to_nobody, 4, "run: belongs to user 65534, not to user 0"),
}


@pytest.mark.slow
def test_a_run_directory_of_somebody_else_is_refused(tmp_path):
    write(tmp_path)
    argv = ["train", "tiny.yaml", "trainer.steps=1", "trainer.save_every=1", "warm_start=null"]
    run_well(argv, tmp_path)
    (tmp_path / "run").rename(tmp_path / "whole")
    for name, (attack, status, words) in ATTACKS.items():
        if name == "owner" and os.geteuid() != 0:
            continue
        shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        attack(tmp_path / "run")
        done = fork_ranks([*argv, "trainer.steps=2", "--resume"], tmp_path)
        done.complains_once(words)
        assert set(done.codes) == {status} and "\x1b" not in done.err and done.seconds < 200, name
        shutil.rmtree(tmp_path / "run")

"""Finished responses survive a kill in the midst of a rollout; and the archive holds what was sampled, once."""

import json
import shutil

import h5py
import numpy as np
import pytest

from hybridflow.cli import main
from hybridflow.observe.metrics import read_metrics
from hybridflow.roles.actor import Actor
from hybridflow.rollout import engine, session
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.learned import LearnedIndex
from hybridflow.rollout.log_file import FINISHES, list_logs, read_log
from tests.e2e.commands import fork_ranks, kill_in_step, kill_when_logged, lasting_metrics, run_well, write_recipe
from tests.e2e.test_resume import reused, weights

RUN = [
    *("train", "tiny.yaml", "trainer.steps=4", "trainer.save_every=2", "trainer.keep_last=9"),
    *("rollout.max_concurrent=2", "rollout.archive=true", "trainer.mini_batch_size=8"),
]


def noting(rank):
    """Each rank notes what it gives on to training, and how many responses it generates."""
    sample, drive = Actor.sample, MegatronEngine.drive

    def sample_and_note(self, batch, decided):
        found = sample(self, batch, decided)
        if found is None:  # not on the last stage
            return None
        with open(f"sampled-{rank}", "a") as file:
            for row, ident in enumerate(found.ids.tolist()):
                tokens, log_probs = (found.columns[name].to_list()[row] for name in ("tokens", "rollout_log_probs"))
                step, prompt = decided["train_step"]["step"], int(found.columns["prompt_lengths"][row])
                file.write(json.dumps([step, ident, prompt, tokens.tolist(), log_probs.tolist()]) + "\n")
        return found

    def drive_and_note(self, requests, purpose="rollout", progress=None, **rest):
        pairs = drive(self, requests, purpose, progress, **rest)
        if purpose == "rollout":
            with open(f"generated-{rank}", "a") as file:
                file.write(f"{len(pairs)}\n")
        return pairs

    Actor.sample, MegatronEngine.drive = sample_and_note, drive_and_note


def kill_in_the_rollout_of_step_4(rank):
    """Rank 1 dies in step 4 when the first of its responses are in its log."""
    noting(rank)
    engine.LOOK_STEPS = session.LOOK_STEPS = 4
    if rank == 1:
        kill_when_logged("step-000004")


def sampled(folder):
    """What training was given: (step, sample) -> prompt's length, tokens, log-probs; of several times the last."""
    rows = [json.loads(line) for path in sorted(folder.glob("sampled-*")) for line in path.read_text().splitlines()]
    return {(step, ident): (prompt, tokens, log_probs) for step, ident, prompt, tokens, log_probs in rows}


def archived(folder):
    """The same, from the archive; no sample may be there twice."""
    found = {}
    with h5py.File(folder / "run/rollouts/all.h5") as file:
        data = {name: file[name][:] for name in file}
    prompts = np.split(data["prompt_tokens"], np.cumsum(data["prompt_length"]))
    cuts = np.cumsum(data["response_length"])
    rows = zip(prompts, np.split(data["response_tokens"], cuts), np.split(data["log_probs"], cuts), strict=True)
    for place, (prompt, response, log_probs) in enumerate(list(rows)[:-1]):
        key = int(data["step"][place]), int(data["prompt_index"][place] * 2 + data["index"][place])
        assert key not in found
        found[key] = len(prompt), [*prompt.tolist(), *response.tolist()], log_probs.tolist()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run in one go, and one that was killed in the midst of a rollout."""
    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    for folder, hook in ((whole, noting), (killed, kill_in_the_rollout_of_step_4)):
        write_recipe(folder)
        done = fork_ranks(RUN, folder, hook=hook)
        assert (set(done.codes) == {0}) == (folder == whole) and (folder == killed or done.err == ""), done.err
    return whole, killed


def logs(folder):
    path = folder / "run/rollouts/log"
    return {(name.step, name.rank): read_log(path / str(name)).responses for name in list_logs(path)}


def test_what_was_finished_when_the_job_was_killed_is_not_sampled_again(runs, tmp_path):
    whole, killed = runs
    folder = tmp_path / "resumed"
    shutil.copytree(killed, folder)
    # The checkpoint of step 2 was complete, but no later one had told the ranks so.
    # Which of the two ranks sampled what depends on who was quicker.
    found = {key: len(responses) for key, responses in logs(folder).items()}
    assert found.keys() == {(step, rank) for step in (1, 2, 3, 4) for rank in (0, 1)}
    assert [found[step, 0] + found[step, 1] for step in (1, 2, 3)] == [8, 8, 8]
    num_left = 8 - found[4, 0] - found[4, 1]
    assert found[4, 1] > 0
    for path in folder.glob("generated-*"):
        path.unlink()

    done = run_well([*RUN, "--resume"], folder, hook=noting)
    assert "resumed from run/checkpoints/step_000002" in done.out
    generated = [map(int, (folder / f"generated-{rank}").read_text().split()) for rank in (0, 1)]
    assert [sum(numbers) for numbers in zip(*generated, strict=True)] == [0, num_left]
    assert reused(folder)[3] == 1.0 and 0 < reused(folder)[4] <= 1
    assert lasting_metrics(folder / "run") == lasting_metrics(whole / "run")
    assert weights(folder) == weights(whole)
    assert sampled(folder) == sampled(whole)
    assert logs(folder) == {}


@pytest.mark.slow
def test_the_experts_that_a_killed_rollout_chose_are_not_lost(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    mixture = ["model.num_experts=4", "actor.moe.router_replay=replay", "actor.update={pp: 2}", "loss.epochs=3"]
    argv = [*RUN, *mixture, "trainer.steps=2", "trainer.save_every=1", "rollout.max_concurrent=8"]
    for folder in (whole, killed):
        folder.mkdir()
        write_recipe(folder)
    run_well(argv, whole)
    fork_ranks(argv, killed, hook=lambda rank: kill_in_step(2) if rank == 1 else None)
    run_well([*argv, "--resume"], killed)
    assert reused(killed)[2] == 1.0
    assert lasting_metrics(killed / "run") == lasting_metrics(whole / "run")


def test_archive_holds_what_was_sampled(runs, tmp_path):
    whole, killed = runs
    assert len(sampled(whole)) == 4 * 8 and archived(whole) == sampled(whole)
    with h5py.File(whole / "run/rollouts/all.h5") as file:
        steps, scores, lengths, finishes = (file[name][:] for name in ("step", "score", "response_length", "finish"))
    for row in read_metrics(whole / "run"):
        own = steps == row["step"]
        # Two ranks told of them, each of its own.
        assert np.isclose(scores[own].mean(), row["reward/mean"])
        for name, told in (("reward/", scores[own]), ("response/length_", lengths[own])):
            assert np.isclose(np.quantile(told, 0.9), row[f"{name}p90"]) and np.isclose(told.std(), row[f"{name}std"])
            assert (told.min(), told.max()) == (row[f"{name}min"], row[f"{name}max"])
        assert np.isclose((scores[own] == scores[own].max()).mean(), row["reward/max_share"])
        assert np.isclose((finishes[own] == FINISHES.index("length")).mean(), row["response/cut_share"])
    names = sorted(path.name for path in (whole / "run/rollouts/segments").iterdir())
    assert names == [
        f"step-{steps}-rank-0000{rank}.h5" for steps in ("000001-000002", "000003-000004") for rank in (0, 1)
    ]

    # On one rank, which takes over what the two have left.
    folder = tmp_path / "resumed"
    shutil.copytree(killed, folder)
    alone = ["cluster.ranks=1", "actor.update={}", "actor.rollout={}"]
    run_well([*RUN, *alone, "--resume"], folder, num_ranks=1, hook=noting)
    assert reused(folder) == {3: 1.0}
    # By then rank 1 had noted other samples of step 4; those of the run are the ones that it went on with.
    last = {
        (step, ident): (prompt, tokens, log_probs)
        for step, ident, prompt, tokens, log_probs in map(json.loads, (folder / "sampled-0").read_text().splitlines())
    }
    assert archived(folder) == {**sampled(killed), **last} and len(archived(folder)) == 4 * 8


def learned(folder):
    """What was learned from the samples of the archive, by step and sample, and their scores."""
    with h5py.File(folder / "run/rollouts/all.h5") as file:
        keys = list(zip(*(file[name][:].tolist() for name in ("step", "prompt_index", "index")), strict=True))
        scores = dict(zip(keys, file["score"][:].tolist(), strict=True))
    found = LearnedIndex(folder / "run/rollouts", {step for step, *_ in keys}).find(keys)
    return {key: (scores[key], found[key].advantages, found[key].old_log_probs) for key in keys}


def test_archive_tells_what_was_learned_from_each_sample(runs, tmp_path):
    whole, killed = runs
    names = sorted(path.name for path in (whole / "run/rollouts/learned").iterdir())
    # One replica of the update, whose first rank writes.
    assert names == ["step-000001-000002-rank-00000.h5", "step-000003-000004-rank-00000.h5"]
    found = learned(whole)
    assert len(found) == 4 * 8
    for (step, prompt_index, index), (score, advantages, old_log_probs) in found.items():
        other = found[step, prompt_index, 1 - index][0]
        # Of two samples GRPO gives the better one half the difference over the deviation: 1/sqrt(2).
        assert np.allclose(advantages, np.sign(score - other) / np.sqrt(2), atol=1e-4) and len(advantages) > 0
        # One update learns from the batch, with the log-probabilities that it computes itself.
        assert np.isnan(old_log_probs).all()

    folder = tmp_path / "resumed"
    shutil.copytree(killed, folder)
    run_well([*RUN, "--resume"], folder)
    again = learned(folder)
    assert again.keys() == found.keys()
    assert all(np.array_equal(again[key][1], found[key][1]) for key in found)


@pytest.mark.slow
def test_samples_of_other_weights_are_not_used(runs, tmp_path):
    """With another rate step 3 measures the same, and leaves other weights."""
    whole, killed = runs
    folder = tmp_path / "faster"
    shutil.copytree(killed, folder)
    run_well([*RUN, "actor.optimizer.lr=2e-2", "--resume"], folder, hook=noting)
    assert reused(folder) == {3: 1.0}
    rows = [lasting_metrics(place / "run") for place in (folder, whole)]
    names = ("actor/loss", "actor/grad_norm")
    assert [rows[0][2][name] for name in names] == [rows[1][2][name] for name in names]
    assert [rows[0][3][name] for name in names] != [rows[1][3][name] for name in names]


@pytest.mark.slow
def test_a_log_that_was_torn_or_spoiled_gives_what_is_whole(runs, tmp_path):
    whole, killed = runs
    folder = tmp_path / "torn"
    shutil.copytree(killed, folder)
    for name in list_logs(folder / "run/rollouts/log"):
        path = folder / "run/rollouts/log" / str(name)
        data = bytearray(path.read_bytes())
        if name.step == 3 and name.rank == 0:
            path.write_bytes(data[: len(data) // 2])
        elif name.step == 3:
            data[-3] ^= 1
            path.write_bytes(data)
        elif name.step == 4:
            path.write_bytes(b"")
    run_well([*RUN, "--resume"], folder, hook=noting)
    assert reused(folder).keys() == {3}
    assert {key: found[:2] for key, found in sampled(folder).items()} == {
        key: found[:2] for key, found in sampled(whole).items()
    }


@pytest.mark.slow
def test_going_back_to_an_earlier_checkpoint_takes_its_later_samples_out(runs, tmp_path):
    whole, _ = runs
    folder = tmp_path / "back"
    shutil.copytree(whole, folder)
    (folder / "run/checkpoints/latest").write_text("step_000002\n")
    run_well([*RUN, "trainer.steps=3", "--resume"], folder, hook=noting)
    assert archived(folder) == {key: value for key, value in sampled(whole).items() if key[0] <= 3}


NEW = ["train", "tiny.yaml", "trainer.steps=2", "warm_start=null", "trainer.mini_batch_size=8"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Without a warm start: a run in one go, and one that was killed in its second step, before any checkpoint."""

    def kill(rank):
        if rank == 1:
            kill_when_logged("step-000002")

    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    for folder, hook in ((whole, noting), (killed, kill)):
        write_recipe(folder)
        done = fork_ranks(NEW, folder, hook=hook)
        assert (set(done.codes) == {0}) == (folder == whole), done.err
    assert not (killed / "run/checkpoints/latest").exists()
    return whole, killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--resume"], {1: 1.0, 2: 1.0}),
        ([], {}),
        (["--resume", "rollout.temperature=0.9"], {}),
        (["--resume", "actor.update={dp: 2}", "actor.rollout={pp: 2}"], {1: 1.0}),
        (["--resume", "seed=5"], {}),
    ],
)
def test_before_the_first_checkpoint_the_same_recipe_finds_its_samples(first, argv, expected, tmp_path):
    whole, killed = first
    folder = tmp_path / "again"
    shutil.copytree(killed, folder)
    assert len(logs(folder)) > 2
    run_well([*NEW, *argv], folder, hook=noting)
    assert reused(folder) == expected and logs(folder) == {}
    if argv == ["--resume"]:
        assert lasting_metrics(folder / "run") == lasting_metrics(whole / "run")
        assert sampled(folder) == sampled(whole)


def test_log_that_cannot_be_written_ends_the_job(tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "run/rollouts").mkdir(parents=True)
    (tmp_path / "run/rollouts/log").write_text("no directory")
    done = fork_ranks(RUN, tmp_path)
    assert "run/rollouts/log" in done.err and "cannot be written" in done.err and "set another run_dir" in done.err
    assert "Traceback" not in done.err and 0 not in done.codes


def shown(capsys, *words):
    """What ``hybridflow rollouts`` prints, as JSON."""
    assert main(["rollouts", *map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_samples_are_shown_to_a_person(runs, capsys):
    run = runs[0] / "run"
    everything = shown(capsys, run, "--steps", "1-4", "--number", "99")
    assert {(each["step"], each["prompt_index"] * 2 + each["index"]) for each in everything} == set(sampled(runs[0]))
    for each in everything:
        _, tokens, log_probs = sampled(runs[0])[each["step"], each["prompt_index"] * 2 + each["index"]]
        assert each["prompt_tokens"] + each["response_tokens"] == tokens
        assert np.allclose(each["log_probs"], log_probs) and set(each["versions"]) <= {each["step"] - 1}
        assert each["prompt"].endswith("=")
    scores = sorted(each["score"] for each in everything)
    assert [each["score"] for each in shown(capsys, run, "--worst", "--number", "3")] == scores[:3]
    assert [each["score"] for each in shown(capsys, run, "--best", "--number", "3")] == scores[:-4:-1]
    assert {each["step"] for each in shown(capsys, run)} == {4}
    found = shown(capsys, run, "--grep", "^1", "--number", "99")
    assert found == [each for each in everything if each["prompt"][:1] == "1" or each["response"][:1] == "1"] != []
    assert main(["rollouts", str(run), "--steps", "2", "--number", "1"]) == 0
    head, prompt, *_ = capsys.readouterr().out.splitlines()
    assert head.startswith("step 2 | prompt ") and " | score " in head and "weights after 1 updates" in head
    assert prompt.startswith("  prompt    ") and prompt.endswith("=")


@pytest.mark.parametrize(
    "words, status, told",
    [
        (("--steps", "x"), 2, "--steps x"),
        (("--steps", "60-50"), 2, "--steps 60-50: the last step is before the first; give 50-60"),
        (("--number", "0"), 2, "--number 0: expected at least 1"),
        (("--export", "a.jsonl", "--as", "kto", "--min-score", "nan"), 2, "--min-score nan: expected a number"),
        (("--grep", "("), 2, "--grep"),
        (("--tokenizer", "nowhere.model"), 2, "nowhere.model"),
        (("--grep", "no such text"), 0, "no sample matches"),
    ],
)
def test_what_cannot_be_shown_is_told(runs, words, status, told, capsys):
    assert main(["rollouts", str(runs[0] / "run"), *words]) == status
    assert told in capsys.readouterr().err


def replayed(folder, runs, *argv, num_ranks=2):
    write_recipe(folder)
    run_well([*RUN, f"rollout.replay={runs[0] / 'run'}", *argv], folder, num_ranks=num_ranks, hook=noting)
    assert {int(line) for path in folder.glob("generated-*") for line in path.read_text().split()} == {0}
    assert all(row["rollout/reused"] == 1 for row in read_metrics(folder / "run"))


@pytest.mark.slow
def test_a_run_that_is_replayed_is_the_same_to_the_last_bit(runs, tmp_path):
    replayed(tmp_path, runs, "correction.kind=none")
    assert lasting_metrics(tmp_path / "run") == lasting_metrics(runs[0] / "run")
    assert weights(tmp_path) == weights(runs[0])
    assert sampled(tmp_path) == archived(tmp_path) == sampled(runs[0])


@pytest.mark.slow
def test_other_ranks_and_another_algorithm_learn_from_the_same_samples(runs, tmp_path):
    for algorithm in ("grpo", "rloo"):
        folder = tmp_path / algorithm
        folder.mkdir()
        alone = ["cluster.ranks=1", "actor.update={}", "actor.rollout={}", f"algorithm={algorithm}"]
        replayed(folder, runs, *alone, num_ranks=1)
        assert sampled(folder) == sampled(runs[0])
    rows = [lasting_metrics(folder / "run") for folder in (runs[0], tmp_path / "grpo", tmp_path / "rloo")]
    for first, again, other in zip(*rows, strict=True):
        assert first["reward/mean"] == again["reward/mean"] == other["reward/mean"]
        # The same weights sampled, so that nothing is to be corrected but what rounding makes.
        assert again["correction/effective_share"] > 0.999 and "correction/effective_share" not in first
        assert np.isclose(again["actor/loss"], first["actor/loss"], atol=1e-4)
        assert np.isclose(again["actor/grad_norm"], first["actor/grad_norm"], rtol=1e-3)
        assert not np.isclose(other["actor/grad_norm"], first["actor/grad_norm"], rtol=1e-3)


def test_samples_of_other_data_are_not_replayed(runs, tmp_path):
    write_recipe(tmp_path)
    done = fork_ranks([*RUN, f"rollout.replay={runs[0] / 'run'}", "seed=5"], tmp_path)
    assert "was sampled for another prompt" in done.err and "Traceback" not in done.err and 0 not in done.codes


def test_samples_are_trained_on(runs, tmp_path, capsys):
    """By a run with the same tokenizer, which imitates the best."""
    run, best = runs[0] / "run", tmp_path / "best.jsonl"
    assert main(["rollouts", str(run), "--export", str(best), "--as", "sft"]) == 0
    rows = [json.loads(line) for line in best.read_text().splitlines()]
    assert f"wrote {len(rows)} rows to {best}; left out: " in capsys.readouterr().err
    whole = [each for each in shown(capsys, run, "--steps", "1-4", "--number", "99") if each["finish"] == "stop"]
    assert {row["prompt"] for row in rows} == {each["prompt"] for each in whole} and len(rows) > 3
    for row in rows:
        assert row["score"] == max(each["score"] for each in whole if each["prompt"] == row["prompt"])
        place = [row[name] for name in ("step", "prompt_index", "index")]
        (found,) = (each for each in whole if [each[name] for name in ("step", "prompt_index", "index")] == place)
        assert (row["answer"], row["score"]) == (found["response"], found["score"])
    linked = tmp_path / "linked.jsonl"
    linked.symlink_to(tmp_path / "named-by-a-link.jsonl")
    assert main(["rollouts", str(run), "--export", str(linked), "--as", "sft"]) == 0
    assert linked.is_symlink() and linked.read_text() == best.read_text()
    learn = [
        *("train", "sft", f"data.train={best}", f"data.held_out={best}", "data.arithmetic=null"),
        *("cluster.ranks=1", "actor.update={}", "actor.rollout={}", "trainer.steps=1", "trainer.global_batch_size=4"),
        *("trainer.mini_batch_size=4", f"tokenizer={{path: {run / 'tokenizer.model'}}}", "model.max_context=24"),
        f"run_dir={tmp_path / 'learned'}",
    ]
    run_well(learn, tmp_path, num_ranks=1)
    assert read_metrics(tmp_path / "learned")[0]["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    "words, told",
    [
        (("--export", "a.jsonl"), "--as"),
        (("--as", "sft"), "--export"),
        (("--export", "a.jsonl", "--as", "sft", "--best"), "--best"),
        (("--export", "a.jsonl", "--as", "sft", "--min-score", "99"), "below --min-score"),
        (("--export", "nowhere/a.jsonl", "--as", "sft"), "cannot be written"),
        (("--export", "/dev/null", "--as", "sft"), "--export: found a device or a pipe at /dev/null"),
        (("--min-score", "1"), "--export"),
    ],
)
def test_what_cannot_be_exported_is_told(runs, words, told, capsys):
    assert main(["rollouts", str(runs[0] / "run"), *words]) == (4 if "nowhere" in words[1] else 2)
    assert told in capsys.readouterr().err


def test_a_run_without_an_archive_and_a_damaged_one_are_told(runs, tmp_path, capsys):
    assert main(["rollouts", str(tmp_path)]) == 2
    assert f"{tmp_path}: holds no run (" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    assert main(["rollouts", str(tmp_path)]) == 2
    assert "holds no archive; samples enter it with each checkpoint" in capsys.readouterr().err
    run = tmp_path / "run"
    shutil.copytree(runs[0] / "run", run)
    segment = sorted((run / "rollouts/segments").iterdir())[-1]
    segment.write_bytes(segment.read_bytes()[:-100])
    assert main(["rollouts", str(run)]) == 3
    assert segment.name in capsys.readouterr().err

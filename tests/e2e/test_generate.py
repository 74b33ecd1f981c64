"""``hybridflow generate`` on a tiny model: the same text on any ranks and after any end, as of ``transformers``."""

import json
import os
import signal

import pytest
import tokenizers
import torch
import transformers

import hybridflow.serving.serve  # noqa: F401  # what ranks import, imported once, before they are forked
from hybridflow.exit_status import DONE, FAILURE, REQUEST, REQUEUE, TARGET
from hybridflow.serving import batch
from hybridflow.serving.results import ResultLog, Results
from tests.e2e.commands import Done, fork_ranks
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.plain_models import greedy, token_log_probs
from tests.support.waiting import wait_until

NUM_PROMPTS = 12
ARGUMENTS = [
    *("generate", "--model", "model", "--prompts", "prompts.jsonl", "--max-new-tokens", "10", "-n", "2"),
    *("--log-probs", "--temperature", "0.9", "--top-p", "0.9", "--max-concurrent", "3"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("generate")
    write_model(path / "model", seed=3, num_key_value_heads=4)
    write_tokenizer(path / "model")
    lines = [{"prompt": f"{7 * a}+{a * a}=", "id": f"row {a}"} for a in range(NUM_PROMPTS - 2)]
    lines += [{"prompt_ids": [5, 9, 12, 7], "sampling": {"greedy": True, "max_new_tokens": 30, "n": 1}}]
    lines += [{"prompt": "1+1=", "sampling": {"temperature": 0, "n": 1, "stop_ids": []}}]
    (path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def generate(folder, out, *more, num_ranks=1, **others) -> Done:
    return fork_ranks([*ARGUMENTS, "--out", out, *more], folder, num_ranks=num_ranks, **others)


def rows(folder, out):
    return [json.loads(line) for line in (folder / out).read_text().splitlines()]


def same(one, other):
    """Whether two outputs are of the same text, and of log-probabilities as near as fp32 has them."""
    bare = [[{**row, "log_probs": None} for row in each] for each in (one, other)]
    assert bare[0] == bare[1]
    for a, b in zip(one, other, strict=True):
        assert torch.tensor(a["log_probs"]).sub(torch.tensor(b["log_probs"])).abs().max() <= 1e-5


@pytest.fixture(scope="module")
def whole(folder):
    done = generate(folder, "whole.jsonl")
    assert done.codes == (DONE,) and done.err == "", done.err
    assert "whole.jsonl: 22 samples of 12 prompts, 0 failed" in done.out
    return rows(folder, "whole.jsonl")


def test_lines_are_in_order_and_greedy_ones_are_those_of_transformers(folder, whole):
    assert [(row.get("id"), row["sample"]) for row in whole[:4]] == [
        ("row 0", 0),
        ("row 0", 1),
        ("row 1", 0),
        ("row 1", 1),
    ]
    texts = tokenizers.Tokenizer.from_file(str(folder / "model/tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    for row in whole:
        assert row["text"] == texts.decode(row["token_ids"], skip_special_tokens=True)
        assert row["finish"] == ("stop" if row["token_ids"][-1] == 0 else "length")
        assert len(row["log_probs"]) == len(row["token_ids"]) <= 30
    assert len({tuple(row["token_ids"]) for row in whole}) > 15, "samples are all alike"
    # A line that asks for temperature 0 has no other; that of the first divides logits of which it takes the largest.
    for row, prompt, most, eos, temperature in [
        (whole[-2], [5, 9, 12, 7], 30, 0, 0.9),
        (whole[-1], texts.encode("1+1=").ids, 10, None, 1.0),
    ]:
        expected, is_tie = greedy(lambda ids: model(ids).logits, prompt, most, eos)
        assert row["token_ids"][: len(expected)] == expected and (is_tie or len(row["token_ids"]) == len(expected))
        assert len(expected) > 4
        tokens = torch.tensor([*prompt, *expected])
        with torch.no_grad():
            told = token_log_probs(model(tokens[None]).logits[0], tokens, temperature)
        theirs = told[len(prompt) - 1 :]
        assert (theirs - torch.tensor(row["log_probs"][: len(expected)])).abs().max() <= 1e-4


def test_text_that_goes_past_a_chat_template_is_told_of(folder, whole):
    template = folder / "model/chat_template.jinja"
    template.write_text("{% for each in messages %}<{{ each.content }}>{% endfor %}")
    (folder / "talk.jsonl").write_text('{"messages": [{"role": "user", "content": "1+1="}]}\n')
    words = "hybridflow: prompts are plain text; for a chat model a line is "
    try:
        for out, more, is_plain in (("past.jsonl", (), True), ("said.jsonl", ("--prompts", "talk.jsonl"), False)):
            done = generate(folder, out, *more)
            assert (done.codes, done.err) == ((DONE,), "") and (words in done.out) is is_plain
    finally:
        template.unlink()
    assert [row["text"] for row in rows(folder, "past.jsonl")] == [row["text"] for row in whole]


def seeing_what_another_writes(rank):
    """A hook: rank 1 looks so late for earlier results that it finds one that rank 0 has just made."""
    if rank == 1:
        find = Results.find
        Results.find = lambda self: {**find(self), (0, 0): None}


@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("tp2", "pp2"))]
)
def test_two_ranks_write_the_same(folder, whole, layout):
    done = generate(folder, f"{layout}.jsonl", "--layout", layout, num_ranks=2, hook=seeing_what_another_writes)
    assert done.codes == (DONE, DONE) and done.err == "", done.err
    same(rows(folder, f"{layout}.jsonl"), whole)


def ending(at, signum):
    """A hook: when the last rank has kept samples ``at`` times, it gets a signal."""

    def hook(rank):
        add, stopping, turns = ResultLog.add, batch.Stopping, 0
        watches = []

        class Remembering(stopping):
            def __init__(self, world, *others):
                super().__init__(world, *others)
                watches.append(world.watch)

        def wrapped(self, found):
            nonlocal turns
            add(self, found)
            turns += 1
            if turns == at and rank == int(os.environ["WORLD_SIZE"]) - 1:
                os.kill(os.getpid(), signum)
                wait_until(lambda: watches[0].stop_reason is not None, what="the watch hears of the signal")

        ResultLog.add, batch.Stopping = wrapped, Remembering

    return hook


@pytest.mark.parametrize(
    ("signum", "num_ranks"),
    [
        (signal.SIGKILL, 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((signal.SIGUSR1, 2), (signal.SIGTERM, 1))),
    ],
)
def test_after_a_kill_or_a_signal_it_goes_on_where_it_was(folder, whole, signum, num_ranks):
    out = f"ended-{signum}.jsonl"
    ended = generate(folder, out, num_ranks=num_ranks, hook=ending(3, signum))
    assert ended.codes == ((-signum if signum == signal.SIGKILL else REQUEUE),) * num_ranks, ended.err
    assert not (folder / out).exists()
    kept = sum(len(path.read_text().splitlines()) for path in (folder / f"{out}.parts").glob("*.log"))
    assert 3 <= kept < 22, "it ended in the midst"
    for more in ((), ("--dry-run",)):
        other = generate(folder, out, "--seed", "8", *more)
        assert other.codes == (REQUEST,)
        other.complains_once("another seed", "--force")
    done = generate(folder, out)
    assert done.codes == (DONE,) and f"now {22 - kept} samples" in done.out, (done.out, done.err)
    same(rows(folder, out), whole)
    again = generate(folder, out)
    assert again.codes == (TARGET,)
    again.complains_once("is there already", "--force")


def test_bad_lines_are_told_in_their_places_and_strict_stops_at_the_first(folder, whole):
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    long = json.dumps({"prompt": "1+" * 100})
    (folder / "bad.jsonl").write_text("\n".join([*lines[:2], "nonsense", long, *lines[2:]]) + "\n")
    bad = ["--prompts", "bad.jsonl"]
    done = generate(folder, "bad-out.jsonl", *bad)
    assert done.codes == (FAILURE,) and "24 samples of 14 prompts, 2 failed" in done.out, done.err
    done.complains_once("bad.jsonl:3", "not valid JSON", "the first of 2 that failed")
    found = rows(folder, "bad-out.jsonl")
    failed = [row for row in found if row["finish"] == "failed"]
    assert (
        "not valid JSON" in failed[0]["error"]
        and failed[0]["place"] == "bad.jsonl:3"
        and "context" in failed[1]["error"]
    )
    # Lines after the bad ones have other numbers, so other noise; those before, and those without, are as before.
    good = [row for row in found if row["finish"] != "failed"]
    same([*good[:4], *good[-2:]], [*whole[:4], *whole[-2:]])
    strict = generate(folder, "strict.jsonl", *bad, "--strict")
    strict.complains_once("bad.jsonl:3", "not valid JSON")
    assert strict.codes == (REQUEST,) and not (folder / "strict.jsonl").exists()
    dry = generate(folder, "dry.jsonl", *bad, "--dry-run")
    assert dry.codes == (FAILURE,) and "14 prompts, 2 of them bad; 22 samples" in dry.out, dry.err
    assert not list(folder.glob("dry*"))


@pytest.mark.parametrize(
    ("more", "words", "status"),
    [
        (("--model", "absent"), ("absent", "checkpoint"), 3),
        (("--prompts", "absent.jsonl"), ("absent.jsonl",), REQUEST),
        (("--layout", "tp3"), ("--layout", "1 ranks"), REQUEST),
        (("--top-p", "2"), ("top_p", "at most 1"), REQUEST),
        (("--layout", "tp3", "--ranks", "3", "--dry-run"), ("--layout tp3", "num_attention_heads"), REQUEST),
        (("--max-context", "1000"), ("--max-context 1000", "64"), REQUEST),
        (("--out", "absent/x.jsonl"), ("no directory",), TARGET),
    ],
)
def test_what_cannot_be_is_told_once(folder, more, words, status):
    done = generate(folder, "refused.jsonl", *more)
    done.complains_once(*words)
    assert done.codes == (status,)


@pytest.mark.slow
def test_hdf5_in_and_out_and_half_precision(folder, whole):
    import h5py

    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()[:10]]
    with h5py.File(folder / "prompts.h5", "w") as file:
        file.create_dataset("prompt", data=prompts, dtype=h5py.string_dtype())
    done = generate(folder, "out.h5", "--prompts", "prompts.h5")
    assert done.codes == (DONE,), done.err
    with h5py.File(folder / "out.h5") as file:
        assert list(file["text"].asstr()) == [row["text"] for row in whole[:20]]
        assert list(file["prompt"].asstr()) == [row["prompt"] for row in whole[:20]]
        tokens = [token for row in whole[:20] for token in row["token_ids"]]
        assert file["response_tokens"][:].tolist() == tokens
        assert file["response_length"][:].tolist() == [len(row["token_ids"]) for row in whole[:20]]
        assert len(file["log_probs"]) == len(tokens)
    half = generate(folder, "half.jsonl", "--dtype", "fp16")
    assert half.codes == (DONE,) and "fp16" in half.out, half.err
    # Rounding of 2^-11 in two layers moves log-probabilities by little: the first token's are those of fp32 but for it.
    pairs = [
        (one["log_probs"][0], two["log_probs"][0])
        for one, two in zip(rows(folder, "half.jsonl"), whole, strict=True)
        if one["token_ids"][0] == two["token_ids"][0]
    ]
    assert len(pairs) > 15 and 0 < max(abs(one - two) for one, two in pairs) < 0.05

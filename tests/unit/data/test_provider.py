"""``DataProvider``: batches, what is read ahead, and going on at any number of ranks without a row lost or repeated."""

import re
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config.data import DataConfig
from hybridflow.data import provider as provider_module
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.provider import DataProvider
from hybridflow.errors import ConfigError, DataError
from hybridflow.sections import parse_yaml, read_section
from tests.support.row_files import write_rows

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(23)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("provider")
    for name, rows in (("one", ROWS), ("two", [{"prompt": f"t{number}", "answer": ""} for number in range(7)])):
        write_rows(folder / name, rows, "jsonl")
    return folder


def providers(folder, dp_size, **options):
    paths = [folder / "one.jsonl", folder / "two.jsonl"]
    options = {"seed": 3, "cache_dir": folder / "cache", "prefetch_factor": 0, **options}
    return [DataProvider(paths, dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]


def prompts(batch):
    return [row["prompt"] for row in batch]


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
    st.sampled_from([None, (3.0, 1.0)]),
)
@settings(max_examples=25, deadline=None)
def test_killed_and_resumed_at_any_number_of_ranks_nothing_is_lost_or_repeated(folder, runs, weights):
    """Each run has (ranks, batch size, turns); its state goes to the next, which has others."""
    (whole,) = providers(folder, 1, weights=weights)
    stream = iter(whole)
    state = None
    for dp_size, batch_size, turns in runs:
        ranks = providers(folder, dp_size, batch_size=batch_size, weights=weights)
        if state is not None:
            for rank in ranks:
                rank.load_state_dict(state)
        iterators = [iter(rank) for rank in ranks]
        for _ in range(turns):
            drawn = [prompt for each in iterators for prompt in prompts(next(each))]
            assert drawn == [prompts(next(stream))[0] for _ in range(dp_size * batch_size)]
        (state,) = {tuple(rank.state_dict().items()) for rank in ranks}
        state = dict(state)


def test_epochs_end_and_ranks_take_as_many_turns(folder):
    ranks = providers(folder, 4, batch_size=4, num_epochs=2)
    turns = list(zip(*ranks, strict=True))
    # 60 draws: three turns of 16, and one of 12.
    assert [[len(batch) for batch in turn] for turn in turns] == [[4] * 4] * 3 + [[3] * 4]
    drawn = [prompt for turn in turns for batch in turn for prompt in prompts(batch)]
    assert sorted(drawn[:30]) == sorted(drawn[30:]) and len(set(drawn)) == 30
    assert ranks[0].num_rows == 30
    more = providers(folder, 7, batch_size=2, num_epochs=1)
    # 30 draws: two turns of 14, and 2 with 5 of the next epoch.
    turns = list(zip(*more, strict=True))
    assert [[len(batch) for batch in turn] for turn in turns] == [[2] * 7] * 2 + [[1] * 7]
    last = [prompt for batch in turns[-1] for prompt in prompts(batch)]
    (plain,) = providers(folder, 1, batch_size=35)
    assert last == prompts(next(iter(plain)))[28:]


def test_what_was_read_ahead_is_given_again(folder):
    (ahead,) = providers(folder, 1, batch_size=2, prefetch_factor=4)
    (plain,) = providers(folder, 1, batch_size=2)
    first = [prompts(batch) for batch, _ in zip(ahead, range(3), strict=False)][:3]
    assert ahead.state_dict()["next_prompt_index"] == 8, "zip has taken a fourth, which the program has seen"
    ahead.load_state_dict({**ahead.state_dict(), "next_prompt_index": 6})
    second = [prompts(batch) for _, batch in zip(range(3), ahead, strict=False)]
    expected = [prompts(batch) for _, batch in zip(range(6), plain, strict=False)]
    assert first + second == expected
    assert ahead.state_dict() == plain.state_dict()


def test_reading_ahead_is_bounded_and_ends(folder):
    read = []

    def turns():
        for number in range(10**9):
            read.append(number)
            yield [{"prompt": str(number)}], number

    before = threading.active_count()
    ahead = provider_module._ahead(turns(), 4)
    next(ahead)
    time.sleep(0.3)
    assert len(read) <= 1 + 4 + 1, "one taken, four that wait, and one that is in hand"
    ahead.close()
    assert threading.active_count() == before


def test_an_error_while_reading_ahead_reaches_the_program(folder):
    def turns():
        yield [{"prompt": "1"}], 1
        raise DataError("row 7 cannot be read")

    ahead = provider_module._ahead(turns(), 2)
    assert next(ahead) == ([{"prompt": "1"}], 1)
    with pytest.raises(DataError, match="row 7"):
        next(ahead)


def test_rows_in_memory_and_their_tokens(tmp_path):
    tokenizer = train_tokenizer([row["prompt"] for row in ROWS], path=tmp_path / "tokenizer.model", vocab_size=64)
    with DataProvider(ROWS, tokenizer=tokenizer, max_prompt_tokens=5, num_epochs=1) as one:
        rows = [row for batch in one for row in batch]
        assert sorted(row["prompt"] for row in rows) == sorted(f"{number}+1=" for number in range(10)), "of 5 tokens"
        assert all(row["prompt_ids"] == [tokenizer.bos_id, *tokenizer.encode(row["prompt"])] for row in rows)
    nested = [{"data": {"question": row["prompt"]}} for row in ROWS]
    with DataProvider(nested, tokenizer=tokenizer, prompt_field="data.question") as one:
        (row,) = next(iter(one))
        assert row["prompt_ids"] == [tokenizer.bos_id, *tokenizer.encode(row["data"]["question"])]


def test_a_data_set_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    given_rows = datasets.Dataset.from_list(ROWS)
    one, other = DataProvider(given_rows), DataProvider(str(write_rows(tmp_path / "rows", ROWS, "parquet")))
    assert one.sha256 == other.sha256
    pairs = zip(range(30), one, other, strict=False)
    assert all(left == right for _, left, right in pairs)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (dict(data_path=7), ConfigError, "data_path is int; give a path, several, or an iterable of rows"),
        (dict(data_path=[]), ConfigError, "data_path is an empty list"),
        (dict(data_path="a", batch_size=0), ConfigError, "batch_size=0; give an integer of at least 1"),
        (dict(data_path="a", dp_rank=2, dp_size=2), ConfigError, "dp_rank=2 of dp_size=2"),
        (dict(data_path=["a", "b"], weights=[1]), ConfigError, "1 weights for 2 paths"),
        (dict(data_path=["a", "b"], weights=[1, 0]), ConfigError, "weight"),
        (dict(data_path=["a", "b"], weights=[1, 1], num_epochs=1), ConfigError, "leave num_epochs out"),
        (dict(data_path="a", max_prompt_tokens=5), ConfigError, "give the tokenizer too"),
        (dict(data_path="a", file_format="csv"), ConfigError, "file_format"),
        (dict(data_path="a", prompt_feild="q"), ConfigError, "prompt_feild"),
        (dict(data_path=ROWS, weights=[1]), ConfigError, "for rows in memory"),
        (dict(data_path="none.jsonl"), DataError, "none.jsonl: cannot be read"),
    ],
)
def test_arguments_that_cannot_be(arguments, error, says):
    with pytest.raises(error) as caught:
        next(iter(DataProvider(**arguments)))
    assert says in str(caught.value)


def test_states_of_other_rows_are_refused(folder):
    (one,) = providers(folder, 1)
    other = DataProvider(ROWS)
    with pytest.raises(DataError, match="the state is of other rows"):
        other.load_state_dict(one.state_dict())
    with pytest.raises(DataError, match="next_prompt_index=-1 is no state"):
        one.load_state_dict({**one.state_dict(), "next_prompt_index": -1})


def test_states_of_another_seed_are_refused(folder):
    (one,) = providers(folder, 1)
    other, by_default = providers(folder, 1, seed=4)[0], providers(folder, 1, seed=None)[0]
    with pytest.raises(DataError, match="the state is of seed=3, this one has seed=4.*give seed=3"):
        other.load_state_dict(one.state_dict())
    by_default.load_state_dict(providers(folder, 1, seed=1)[0].state_dict())
    # As it was before states had a seed.
    older = {"next_prompt_index": 7, "sha256": one.sha256}
    other.load_state_dict(older)
    assert other.state_dict() == {**older, "seed": 4}


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    page = (Path(__file__).parents[3] / "docs/data.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    write_rows(tmp_path / "rows", ROWS, "parquet")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, "docs/data.md", "exec"), names)
    assert len(names["prompts"]) == 8 and names["state"]["next_prompt_index"] == 8


def test_the_sections_of_the_documentation_are_valid():
    page = (Path(__file__).parents[3] / "docs/data.md").read_text(encoding="utf-8")
    sections = [parse_yaml(text, "docs/data.md") for text in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)]
    found = [read_section(DataConfig, section["data"], source="docs/data.md") for section in sections]
    assert [len(data.mixture) for data in found] == [2, 0, 0]
    assert found[1].spool is not None and found[2].kafka is not None


@pytest.mark.parametrize("row", [{"prompt": 7, "answer": "8"}, {"prompt": {"a": "7"}}])
def test_the_prompt_is_text(tmp_path, row):
    for path in (write_rows(tmp_path / "rows", [row], "jsonl"), [row]):
        with DataProvider(path) as one, pytest.raises(DataError, match="row.* field 'prompt': expected text"):
            next(iter(one))
    with DataProvider([row], prompt_field="question", answer_field=None) as one:
        assert next(iter(one)) == [row], "other fields may be of any type"


def test_a_row_keeps_messages_of_which_the_text_of_the_last_does_not_say_all(tmp_path):
    asked = [{"role": "user", "content": "q"}]
    said = [{"role": "assistant", "content": "a"}]
    called = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "3"}, *said]
    row = {"prompt": asked, "chosen": [*asked, *said], "completion": said, "rejected": called, "response": asked}
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    with DataProvider([row], chat_template=tmp_path / "chat.jinja", num_epochs=1) as provider:
        ((found,),) = provider
    assert found == {"prompt": "[q]", "chosen": "a", "completion": "a", "rejected": called, "response": asked}

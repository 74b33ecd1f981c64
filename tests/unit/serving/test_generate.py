"""Prompts, parameters and kept results of ``hybridflow generate``, and the form of requests, without a model."""

import argparse
import gzip
import importlib.util
import json
import os
from codecs import BOM_UTF8
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybridflow.data.chat import chat_template, render_chat
from hybridflow.errors import ConfigError, DataError, WriteError
from hybridflow.exit_status import DONE
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.observe.console import format_bytes
from hybridflow.rollout.sampling import FAILURES, NOTHING_LEFT
from hybridflow.rollout.texts import GrowingText, Texts, Watch, settled_text, text_before_stop
from hybridflow.serving import batch, command
from hybridflow.serving.api import ApiError, Sample, Served, completion, failure, read_ask
from hybridflow.serving.options import check_together, read_options
from hybridflow.serving.placed import find_tokenizer, memory_line
from hybridflow.serving.prompts import Encoded, Prompt, deal, encode_prompt, encode_text, read_prompts
from hybridflow.serving.results import ResultLog, Results
from tests.support.hf_models import write_tokenizer


class Letters:
    """A tokenizer of bytes: tokens 0 to 255, and 256 ends a text."""

    path = Path("letters/tokenizer.json")
    vocab_size, eos_id, stop_ids, pad_id, bos_id = 257, 256, (256,), 256, None

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def pieces(self):
        return {0: "one", 1: "three"}

    def special_id(self, name):
        return {"<end>": 256, "<turn>": 257}.get(name)


SERVED = Served(name="letters", tokenizer=Letters(), vocab_size=257, max_context=64)


def chatting(folder, template="{% for message in messages %}{{ message.content }}{% endfor %}"):
    """A model whose tokenizer has a chat template."""
    tokenizer = Letters()
    tokenizer.path = folder / "tokenizer.json"
    (folder / "chat_template.jinja").write_text(template)
    return replace(SERVED, tokenizer=tokenizer)


def test_the_samples_of_a_prompt_share_its_tokens_which_take_eight_bytes_each():
    """In a list a number above 256 takes 36 bytes, and a file may have hundreds of thousands of prompts."""
    prompt = Prompt(prompt_index=0, place="p:1")
    task = batch._task(prompt, Encoded([1000, 2000, 3000]), None, {"max_new_tokens": 4, "n": 2}, 64)
    placed = argparse.Namespace(dp=0, mesh=argparse.Namespace(layout=argparse.Namespace(dp=1)))
    one, other = batch._requests([task], set(), placed)
    assert one.prompt.tolist() == [1000, 2000, 3000] and one.prompt.element_size() == 8
    assert one.prompt.data_ptr() == other.prompt.data_ptr() == task.ids.data_ptr()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", 0.5, {"temperature": 0.5, "greedy": False}),
        ("temperature", 0, {"temperature": 1.0, "greedy": True}),
        ("stop", "a", {"stop": ("a",)}),
        ("stop", ["a", "bc"], {"stop": ("a", "bc")}),
        ("logit_bias", {"7": -1, "3": 2.5}, {"logit_bias": ((3, 2.5), (7, -1.0))}),
        ("bad_ids", [[1, 2], [3]], {"bad_ids": ((1, 2), (3,))}),
        ("n", 4, {"n": 4}),
    ],
)
def test_sampling_parameters_take_the_form_of_the_engine(name, value, expected):
    assert read_options({name: value}, "line") == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("temperature", value)
            for value in (-0.1, 1e-9, float("nan"), float("inf"), "1", True, False, None, 10**400)
        ],
        *[("top_p", value) for value in (0, 1.1)],
        *[("n", value) for value in (0, 1.0, True, 10**9)],
        *[("stop", value) for value in ("", [""], [1], 3, ["a"] * 1025)],
        *[("logit_bias", value) for value in (["x"], {"a": 1}, {"1": float("nan")}, 3)],
        *[("bad_ids", value) for value in ([[]], [1], [["a"]])],
        *[("stop_ids", value) for value in ([1.5], "12", 7)],
        *[("seed", value) for value in (0.5, 2**63)],
        ("top_q", 1),
    ],
)
def test_what_is_not_allowed_is_named(name, value):
    with pytest.raises(DataError, match=name):
        read_options({name: value}, "line")


def test_tokens_and_lengths_are_checked_against_each_other_and_the_model():
    with pytest.raises(DataError, match="line: min_new_tokens: found 5, expected at most max_new_tokens=4"):
        check_together({"min_new_tokens": 5, "max_new_tokens": 4}, 10, "line")
    for options in ({"stop_ids": (10,)}, {"logit_bias": ((10, 0.0),)}, {"bad_ids": ((1, 12),)}):
        with pytest.raises(DataError, match="not among the model's, which are 0 to 9"):
            check_together(options, 10, "line")


def test_bad_lines_are_kept_with_what_is_wrong_and_the_others_are_unharmed(tmp_path):
    lines = [
        b'{"prompt": "a", "id": 1, "sampling": {"n": 2}}',
        b"",
        b"nonsense",
        b"[1]",
        b'{"prompt": ""}',
        b'{"prompt": "a", "prompt_ids": [1]}',
        b'{"prompt": "a", "sampling": {"top_p": 2}}',
        b"\xff",
        b"[" * 100_000,
        b'{"prompt": "a", "score": 1e999}',
        b'{"prompt_ids": [1, 2]}',
    ]
    (tmp_path / "p.jsonl").write_bytes(b"\n".join(lines))
    prompts, sha256 = read_prompts(tmp_path / "p.jsonl")
    assert [prompt.prompt_index for prompt in prompts] == list(range(10))
    assert [prompt.prompt_index for prompt in prompts if prompt.error is None] == [0, 9]
    assert prompts[0].options == {"n": 2} and prompts[0].fields["id"] == 1
    assert prompts[1].place.endswith("p.jsonl:3"), "blank lines count in places"
    assert "top_p" in prompts[5].error and "one of them" in prompts[4].error and "not finite" in prompts[8].error
    (tmp_path / "p.jsonl").write_bytes(b"\n".join([*lines, b"{}"]))
    assert read_prompts(tmp_path / "p.jsonl")[1] != sha256
    for content in (b"", b"\n\n"):
        (tmp_path / "p.jsonl").write_bytes(content)
        with pytest.raises(DataError, match="holds no prompts"):
            read_prompts(tmp_path / "p.jsonl")
    os.mkfifo(tmp_path / "pipe")
    for name, found in (("absent.jsonl", "No such file or directory"), ("pipe", "is not a regular file")):
        with pytest.raises(DataError, match=f"^--prompts .*{name}: cannot be read: {found}$"):
            read_prompts(tmp_path / name)


def test_the_prompt_may_have_another_name(tmp_path):
    rows = [{"question": "a", "id": 1}, {"extra": {"question": "b"}}, {"prompt": "c", "question": "d"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named, plain_hash = read_prompts(tmp_path / "p.jsonl", "question")
    assert [prompt.fields.get("prompt") for prompt in named] == ["a", None, "d"]
    assert named[0].fields == {"question": "a", "id": 1, "prompt": "a"}
    inner, _ = read_prompts(tmp_path / "p.jsonl", "extra.question")
    assert [prompt.fields.get("prompt") for prompt in inner] == [None, "b", "c"]
    found, other_hash = read_prompts(tmp_path / "p.jsonl")
    assert found[0].error == (
        "found none of prompt, prompt_ids, messages; give one of them (found question, id), or name its field with "
        "--prompt-field"
    )
    assert plain_hash != other_hash, "another output"


def test_files_of_prompts_are_read_as_those_of_training(tmp_path):
    messages = [{"role": "user", "content": "a"}]
    rows = [{"prompt": "é", "id": 1}, {"prompt": messages}, {"messages": messages, "prompt": None}]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    (tmp_path / "marked.jsonl").write_bytes(BOM_UTF8 + lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines))
    names = ["marked.jsonl", "packed.jsonl.gz"]
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"prompt": ["é", None, None], "messages": [None, messages, messages], "id": [1, 2, 3]})
        pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
        names.append("table.parquet")
    tokenizer = chatting(tmp_path).tokenizer
    for name in names:
        prompts, _ = read_prompts(tmp_path / name)
        assert [prompt.error for prompt in prompts] == [None] * 3 and prompts[0].fields == {"prompt": "é", "id": 1}
        encoded = [encode_prompt(prompt, tokenizer, 257, 64, {}).ids for prompt in prompts]
        assert encoded == [[0xC3, 0xA9], [97], [97]]
        assert prompts[1].place.endswith(f"{name}: row 1" if name == "table.parquet" else f"{name}:2")


def test_the_answer_of_a_row_of_data_is_not_part_of_its_prompt(tmp_path):
    tokenizer, asks = chatting(tmp_path).tokenizer, [{"role": "user", "content": "a"}]
    answers = {"role": "assistant", "content": "b"}

    def ids(field, messages):
        return encode_prompt(Prompt(prompt_index=0, place="p:1", fields={field: messages}), tokenizer, 257, 64, {}).ids

    assert ids("messages", [*asks, answers]) == ids("messages", asks) == [97]
    assert ids("messages", [*asks, answers, *asks]) == [97, 98, 97]
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "source": "web"}
    (tmp_path / "talk.jsonl").write_text(json.dumps(row))
    ((prompt,), _) = read_prompts(tmp_path / "talk.jsonl")
    assert encode_prompt(prompt, tokenizer, 257, 64, {}).ids == [97]
    # What somebody gives as a prompt is one, and so is what nobody asked.
    assert ids("prompt", [*asks, answers]) == [97, 98] and ids("messages", [answers]) == [98]


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 7))
def test_all_work_is_dealt_once_and_evenly(lengths, num_replicas):
    dealt = deal(lengths, num_replicas)
    assert sorted(place for places in dealt for place in places) == list(range(len(lengths)))
    assert all(places == sorted(places) for places in dealt)
    sums = [sum(lengths[place] for place in places) for places in dealt]
    # In turn from the longest, two replicas differ by no more than the longest.
    assert max(sums) - min(sums) <= max(lengths, default=0)


RUN = {"prompts": "abc", "seed": 1}


def row(prompt_index, index=0, text="x"):
    return {"prompt_index": prompt_index, "index": index, "text": text, "token_ids": [1], "finish": "stop"}


def test_what_a_kill_leaves_is_read_as_far_as_it_is_whole(tmp_path):
    results = Results(tmp_path / "out.jsonl")
    results.prepare(RUN, is_forced=False)
    log = ResultLog(results, "1", 0)
    log.add([row(0), row(1, text="first")])
    log.add([row(2)])
    path = next(results.folder.glob("*.log"))
    whole = path.read_bytes()
    other = ResultLog(results, "2", 3)
    other.add([row(1, text="second"), row(3)])
    assert sorted(results.find()) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert [each["text"] for each in results.read(results.find())] == ["x", "first", "x", "x"]
    second = whole.splitlines(keepends=True)[1]
    for torn in (whole[:-1], whole[:-20]):
        path.write_bytes(torn)
        assert sorted(results.find()) == [(0, 0), (1, 0), (3, 0)], "the last line is not whole"
    path.write_bytes(whole.replace(second, second.replace(b"first", b"burst")))
    assert [each["text"] for each in results.read(results.find())] == ["x", "second", "x", "x"], "what was spoiled"


def test_parts_of_something_else_are_noticed_and_force_begins_anew(tmp_path):
    results = Results(tmp_path / "out.jsonl")
    results.prepare(RUN, is_forced=False)
    ResultLog(results, "1", 0).add([row(0)])
    results.prepare(RUN, is_forced=False)
    assert len(results.find()) == 1, "the same goes on"
    with pytest.raises(ConfigError, match="another seed;"):
        results.prepare({**RUN, "seed": 2}, is_forced=False)
    results.prepare(RUN, is_forced=True)
    assert len(results.find()) == 1, "force does not throw away what fits"
    results.prepare({**RUN, "seed": 2}, is_forced=True)
    assert results.find() == {}
    (tmp_path / "out.jsonl").write_text("")
    with pytest.raises(WriteError, match="--force"):
        results.prepare({**RUN, "seed": 2}, is_forced=False)
    with pytest.raises(WriteError, match="no directory"):
        Results(tmp_path / "absent/out.jsonl").prepare(RUN, is_forced=False)


def test_what_is_not_known_to_be_parts_is_left_alone_without_force(tmp_path):
    results = Results(tmp_path / "out.jsonl")
    results.folder.mkdir()
    kept = results.folder / "precious"
    kept.write_text("mine")
    with pytest.raises(WriteError, match="no run.json that can be read"):
        results.prepare(RUN, is_forced=False)
    assert kept.read_text() == "mine"
    results.prepare(RUN, is_forced=True)
    assert not kept.exists()


@pytest.mark.parametrize("suffix", [".jsonl", ".h5"])
def test_force_replaces_the_file_that_a_link_leads_to_and_no_pipe_or_directory(tmp_path, suffix):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / f"far/target{suffix}", tmp_path / f"link{suffix}"
    target.write_text("old")
    link.symlink_to(target)
    results = Results(link)
    results.prepare(RUN, is_forced=True)
    results.finish({}, {})
    assert link.is_symlink() and target.read_bytes()[:3] != b"old" and not results.folder.exists()
    os.mkfifo(tmp_path / "pipe")
    for name, found in (("pipe", "a device or a pipe"), ("far", "a directory")):
        with pytest.raises(ConfigError, match=f"--out: found {found} at "):
            Results(tmp_path / name).prepare(RUN, is_forced=True)


def test_parts_that_another_user_has_prepared_are_refused(tmp_path):
    results, victim = Results(tmp_path / "out.jsonl"), tmp_path / "victim"
    victim.mkdir()
    results.folder.mkdir()
    results.folder.chmod(0o777)
    with pytest.raises(WriteError, match=r"out\.jsonl\.parts: other users may write there \(mode 777\)"):
        results.prepare(RUN, is_forced=False)
    results.folder.rmdir()
    results.folder.symlink_to(victim)
    victim.chmod(0o777)
    with pytest.raises(WriteError, match="other users may write there"):
        results.prepare(RUN, is_forced=True)
    assert list(victim.iterdir()) == []


def test_output_has_the_lines_in_order_with_their_own_fields(tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a", "id": 7, "place": "Bern", "text": "old", "error": 5}\nnonsense\n'
    )
    prompts = {prompt.prompt_index: prompt for prompt in read_prompts(tmp_path / "p.jsonl")[0]}
    results = Results(tmp_path / "out.jsonl")
    results.prepare(RUN, is_forced=False)
    log = ResultLog(results, "1", 0)
    log.add([row(1), row(0, 1, "two \ud800"), row(0, 0, "one")])
    results.finish(prompts, results.find())
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    made = {"token_ids": [1], "finish": "stop"}
    assert lines[:2] == [
        {"prompt": "a", "id": 7, "place": "Bern", "sample": 0, "text": "one", **made},
        {"prompt": "a", "id": 7, "place": "Bern", "sample": 1, "text": "two \ud800", **made},
    ]
    assert lines[2]["place"].endswith("p.jsonl:2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "p.jsonl"], "the parts are gone"


TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "asks": "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m | tojson(ensure_ascii=True, sort_keys=True) }}"
    "{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}",
    "loops": "{%- for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}\n  {{ m.content | trim | tojson }}"
    "{% if m.role == 'end' %}{% break %}{% endif %}{%- endfor %}",
}
MESSAGES = [
    {"role": "user", "content": ' 1 + 1 <"é&'},
    {"role": "end", "content": "x"},
    {"role": "user", "content": "y"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_rendered_as_transformers_does(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    from hybridflow.data.tokenizer import open_tokenizer
    from tests.support.hf_models import START, write_tokenizer

    write_tokenizer(tmp_path, bos_token=START, chat_template=TEMPLATES[name])
    tokenizer = open_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert render_chat(chat_template(tokenizer), tokenizer, MESSAGES) == expected and expected


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if enable_thinking is defined and "
    "not enable_thinking %}<think></think>{% endif %}{{ reasoning_effort | default('') }}{{ bos_token }}"
)
"""As templates of models that think are written."""


def test_variables_of_a_template_are_those_of_the_command_and_the_request(tmp_path):
    transformers = pytest.importorskip("transformers")
    from hybridflow.data.tokenizer import open_tokenizer
    from tests.support.hf_models import START, write_tokenizer

    write_tokenizer(tmp_path, bos_token=START, chat_template=THINKS)
    tokenizer = open_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    for served, asked in ((variables, {}), ({}, variables), ({}, {}), (variables, {"reasoning_effort": "low"})):
        served = Served(name="m", tokenizer=tokenizer, vocab_size=300, max_context=256, **served)
        made = read_ask(json.dumps({"messages": MESSAGES, **asked}).encode(), served, is_chat=True)
        chosen = {**served.chat_template_kwargs, **asked.get("chat_template_kwargs", asked)}
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False, **chosen)
        assert made.prompts == [tokenizer.encode(expected)] and ("<think>" in expected) == ("enable_thinking" in chosen)
        prompt = Prompt(prompt_index=0, place="p:1", fields={"messages": MESSAGES, "chat_template_kwargs": chosen})
        assert [encode_prompt(prompt, tokenizer, 300, 256, {"enable_thinking": True}).ids] == made.prompts
    for wrong, says in (({"tools": []}, "tools is set by hybridflow"), ([1], "expected an object")):
        with pytest.raises(ApiError, match=says):
            read_ask(json.dumps({"messages": MESSAGES, "chat_template_kwargs": wrong}).encode(), served, is_chat=True)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('no system role') }}", "refuses the messages: no system role"),
        ("{{ messages.pop() }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
    ],
)
def test_a_template_that_fails_or_wants_more_is_an_error(template, found, tmp_path):
    tokenizer = Letters()
    tokenizer.path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=found):
        render_chat(template, tokenizer, MESSAGES)


@given(
    st.text(alphabet="abcé😀", max_size=12),
    st.lists(st.text(alphabet="abcé", min_size=1, max_size=3), max_size=3),
    st.integers(0, 6),
)
def test_what_is_streamed_is_a_beginning_of_the_text_without_its_stop(text, stop, fewest):
    tokens, shown, num_sampled = Letters().encode(text), [""], 0
    assume(len(tokens) >= fewest)
    watch, growing = Watch(Texts(Letters()), stop, []), GrowingText(Texts(Letters()))
    for token in tokens:
        num_sampled += 1
        if watch.add(token) and num_sampled >= fewest:
            break
        shown.append(settled_text(growing.add([token]), stop))
    whole = text_before_stop(tokens[:num_sampled], stop, Letters())
    assert all(after.startswith(before) for before, after in zip(shown, [*shown[1:], whole], strict=True)), shown
    # By hand: the shortest beginning that is long enough and ends with a stop text, without the longest of those.
    beginnings = [text[:end] for end in range(len(text) + 1) if len(text[:end].encode()) >= fewest]
    ended = next((each for each in beginnings if any(map(each.endswith, stop))), None)
    longest = max((len(each) for each in stop if ended is not None and ended.endswith(each)), default=0)
    assert whole == (text if ended is None else ended[: len(ended) - longest])


def ask(is_chat=False, **body):
    return read_ask(json.dumps(body).encode(), SERVED, is_chat=is_chat)


def test_a_request_becomes_prompts_and_parameters():
    made = ask(prompt=["ab", "c"], n=2, stop="z", temperature=0, seed=5, model="letters", user="me", max_tokens=None)
    assert made.prompts == [[97, 98], [99]] and made.count == 2
    assert made.params == {
        "greedy": True,
        "temperature": 1.0,
        "seed": 5,
        "stop": ("z",),
        "stop_ids": (256,),
        "max_new_tokens": 16,
    }
    assert ask(prompt=[1, 2]).prompts == [[1, 2]] and ask(prompt=[[1], [2]]).prompts == [[1], [2]]
    assert ask(prompt="a", ignore_eos=True, stop_token_ids=[7]).params["stop_ids"] == (7,)
    assert ask(prompt="a" * 60).params["max_new_tokens"] == 4, "a default is what there is room for"


@pytest.mark.parametrize(("stop", "texts"), [("<end>", ()), (["b", "<end>", "<a>"], ("b", "<a>"))])
def test_the_name_of_a_special_token_ends_a_sample_as_the_token_does(stop, texts, tmp_path):
    asked = ask(prompt="a", stop=stop, stop_token_ids=[7], ignore_eos=True)
    assert asked.params["stop_ids"] == (7, 256) and asked.params["stop"] == asked.stop == texts
    assert ask(prompt="a", bad_words=stop).params["bad"] == texts
    assert ask(prompt="a", bad_words=stop).params["bad_ids"] == ((256,),)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "sampling": {"stop": stop}}))
    ((prompt,), _) = read_prompts(tmp_path / "p.jsonl")
    task = batch._task(prompt, Encoded([97]), Letters(), {"max_new_tokens": 4, "stop_ids": (7,)}, 64)
    assert task.params.stop_ids == (7, 256) and task.params.stop == texts


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({}, "prompt is missing"),
        ({"prompt": "a", "stop": "<turn>"}, "token 257 is not among the model's"),
        ({"prompt": []}, "prompt is missing"),
        ({"prompt": [[]]}, "expected text"),
        ({"prompt": [1, "a"]}, "expected text"),
        ({"prompt": [999]}, "not among the model's"),
        ({"prompt": [-1]}, "not among the model's"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt": "a", "max_tokens": 64}, "exceeds the context of 64"),
        ({"prompt": "a" * 64}, "exceeds the context of 64"),
        ({"prompt": "a" * 321}, "321 characters, the context 64 tokens, which have at most 320"),
        ({"prompt": "a", "n": 0}, "n: found 0"),
        ({"prompt": "a", "n": 257}, "at most 256 samples"),
        ({"prompt": ["a"] * 300}, "at most 256"),
        ({"prompt": "a", "max_tokens": 4, "max_completion_tokens": 4}, "mean the same"),
        ({"prompt": "a", "logprobs": 21}, "logprobs: found 21, expected an integer from 0 to 20"),
        ({"prompt": "a", "logprobs": True}, "logprobs: found True, expected an integer from 0 to 20"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: found 0, expected an integer of at least 1"),
        ({"prompt": "a", "best_of": 3}, "best_of=3"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "stream": 1}, "true or false"),
        ({"prompt": "a", "stream": True, "echo": True}, "cannot be streamed"),
        ({"prompt": "a", "stream_options": []}, "include_usage"),
        ({"prompt": "a", "tools": []}, "unknown parameters tools"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 4}, "min_tokens: found 9, expected at most max_tokens=4"),
        ({"prompt": "a", "max_completion_tokens": 0}, "request: max_tokens: found 0"),
        ({"prompt": "a", "stop_token_ids": ["a"]}, "request: stop_token_ids: found"),
        ({"prompt": "a", "bad_words": [""]}, "request: bad_words: found"),
    ],
)
def test_what_cannot_be_met_is_refused_with_400(body, found):
    with pytest.raises(ApiError, match=found) as refused:
        ask(**body)
    assert refused.value.status == 400
    assert refused.value.body()["error"]["type"] == "invalid_request_error"


def test_the_longest_piece_is_looked_for_once():
    class Counting(Letters):
        num_calls = 0

        def pieces(self):
            self.num_calls += 1
            return super().pieces()

    tokenizer = Counting()
    for _ in range(3):
        assert len(encode_text("a" * 100, tokenizer, 64)) == 100
    assert tokenizer.num_calls == 1


@pytest.mark.parametrize(
    ("exported", "words", "expected"),
    [(None, (), "1"), (None, ("--threads", "2"), "2"), ("8", (), "8"), ("8", ("--threads", "2"), "2")],
)
def test_threads_are_those_that_were_asked_for(monkeypatch, exported, words, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", exported or "")
    if exported is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    for name in ("run_rank", "CaughtSignals"):
        monkeypatch.setattr(command, name, lambda *_: DONE)
    parser = argparse.ArgumentParser()
    command.add_serving(parser.add_subparsers())
    arguments = parser.parse_args(["serve", "--model", "m", *words])
    assert arguments.run(arguments) == DONE and os.environ["OMP_NUM_THREADS"] == expected


def test_fewest_tokens_are_counted_without_the_one_that_stops():
    assert ask(prompt="a", min_tokens=3).params["min_new_tokens"] == 4
    assert ask(prompt="a", min_tokens=3, max_tokens=3).params["min_new_tokens"] == 3
    assert ask(prompt="a", min_tokens=0).params["min_new_tokens"] == 0


def test_bodies_that_are_no_objects_and_other_models_are_refused(tmp_path):
    for content in (b"", b"{", b"[]", b"\xff", b"[" * 200_000):
        with pytest.raises(ApiError) as refused:
            read_ask(content, SERVED, is_chat=False)
        assert refused.value.status == 400
    with pytest.raises(ApiError) as refused:
        ask(prompt="a", model="other")
    assert refused.value.status == 404
    with pytest.raises(ApiError, match="no chat_template"):
        ask(is_chat=True, messages=[{"role": "user", "content": "a"}])
    without = Served(name="letters", tokenizer=None, vocab_size=257, max_context=64)
    for body, is_chat in (({"prompt": "a"}, False), ({"messages": [{}]}, True), ({"prompt": [1], "stop": "a"}, False)):
        with pytest.raises(ApiError, match="no tokenizer"):
            read_ask(json.dumps(body).encode(), without, is_chat=is_chat)


def test_an_answer_with_echo_and_log_probs_has_a_number_for_each_token_but_the_first():
    asked = ask(prompt=["ab", "c"], echo=True, logprobs=0)
    assert asked.params["with_prompt_log_probs"]
    samples = [
        Sample(tokens=[120, 256], log_probs=[-1.0, -2.0], prompt_log_probs=[-3.0], finish="stop", error=None),
        Sample(tokens=[121], log_probs=[-4.0], prompt_log_probs=[], finish="length", error=None),
    ]
    answer = completion(asked, SERVED, samples, "cmpl-1")
    one, two = answer["choices"]
    assert one["text"] == "abx" and one["logprobs"]["token_logprobs"] == [None, -3.0, -1.0, -2.0]
    assert two["text"] == "cy" and two["logprobs"]["tokens"] == ["c", "y"] and two["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    failed = Sample(tokens=[], log_probs=[], prompt_log_probs=None, finish="failed", error="not finite")
    for each, status in ((failed, 500), (replace(failed, is_refused=True), 400)):
        assert "not finite" in str(failure(each)) and failure(each).status == status
    forbidden = replace(failed, is_refused=True, error=f"token 0: {FAILURES[NOTHING_LEFT]}")
    assert "bad_words" in str(failure(forbidden)) and "min_tokens" in str(failure(forbidden))


def test_the_likeliest_tokens_stand_beside_each_token_and_the_likelier_of_one_text_counts():
    top = [[(120, -0.5), (121, -1.0)], [(121, -0.25), (256, -2.0)]]
    sample = Sample(
        tokens=[121, 256],
        log_probs=[-1.0, -2.0],
        prompt_log_probs=[-3.0],
        finish="stop",
        error=None,
        top_log_probs=top,
        prompt_top_log_probs=[[(0xC3, -0.125), (0xE2, -1.5)]],
    )
    asked = ask(prompt="ab", echo=True, logprobs=2)
    assert asked.params["num_top_log_probs"] == 2 and asked.params["with_prompt_log_probs"]
    # Halves of letters have the same text; the token itself is there too, where it is not among the likeliest.
    expected = [None, {"\ufffd": -0.125, "b": -3.0}, {"x": -0.5, "y": -1.0}, {"y": -0.25, "": -2.0}]
    assert completion(asked, SERVED, [sample], "cmpl-1")["choices"][0]["logprobs"]["top_logprobs"] == expected
    alone = completion(ask(prompt="ab", echo=True, logprobs=2, max_tokens=0), SERVED, [sample], "cmpl-1")
    (choice,) = alone["choices"]
    assert choice["text"] == "ab" and choice["finish_reason"] == "length" and choice["token_ids"] == [97, 98]
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0] and choice["logprobs"]["top_logprobs"] == expected[:2]
    assert alone["usage"]["completion_tokens"] == 0
    for number in (0, None):
        plain = replace(sample, top_log_probs=None, prompt_top_log_probs=None)
        body = {} if number is None else {"logprobs": number}
        (choice,) = completion(ask(prompt="ab", echo=True, max_tokens=0, **body), SERVED, [plain], "c")["choices"]
        scores = choice["logprobs"]
        assert scores is None if number is None else scores["token_logprobs"] == [None, -3.0]


def test_log_probs_of_a_chat_have_the_bytes_of_whole_letters(tmp_path):
    served, message = chatting(tmp_path), {"role": "user", "content": "a"}
    asked = read_ask(
        json.dumps({"messages": [message], "logprobs": True, "top_logprobs": 1}).encode(), served, is_chat=True
    )
    sample = Sample(
        tokens=[120, 0xC3],
        log_probs=[-1.0, -2.0],
        prompt_log_probs=None,
        finish="length",
        error=None,
        top_log_probs=[[(121, -0.5)], [(0xC3, -2.0)]],
    )
    first, second = completion(asked, served, [sample], "chat-1")["choices"][0]["logprobs"]["content"]
    likeliest = {"token": "y", "logprob": -0.5, "bytes": [121]}
    assert first == {"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": [likeliest]}
    assert second["bytes"] is None and second["top_logprobs"][0]["logprob"] == second["logprob"]
    for body, found in (
        ({"top_logprobs": 3}, "needs logprobs=true"),
        ({"logprobs": 2}, "true or false"),
        ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
    ):
        with pytest.raises(ApiError, match=found):
            read_ask(json.dumps({"messages": [message], **body}).encode(), served, is_chat=True)


# What Qwen2.5's template says of tools, in short.
TOOLS_TEMPLATE = r"""{% for tool in tools or [] %}{{ tool | tojson }}{{ "\n" }}{% endfor %}
{% if tools %}Call: <tool_call>{"name": <name>, \"arguments\": <object>}</tool_call>{{ "\n" }}{% endif %}
{% for m in messages %}{{ m.role }}:{{ m.content }}
{% for call in m.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}{{ "!" }}{% endfor %}"""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_are_in_the_prompt_and_calls_in_the_answer(tmp_path):
    served = replace(chatting(tmp_path, TOOLS_TEMPLATE), max_context=4096)
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]

    def asking(**body):
        return read_ask(json.dumps({"messages": messages, **body}).encode(), served, is_chat=True)

    # JSON in a field of the request, an object in the text.
    turns = 'user:1+1\n!assistant:\n<tool_call>{"name": "add", "arguments": {"a": [1]}}</tool_call>!tool:2\n!'
    for body in ({}, {"tools": []}, {"tools": [ADD], "tool_choice": "none"}):
        asked = asking(**body)
        assert bytes(asked.prompts[0]).decode() == turns and not asked.has_tools
    asked = asking(tools=[ADD], parallel_tool_calls=False, tool_choice="auto")
    prompt = bytes(asked.prompts[0]).decode()
    assert json.loads(prompt.splitlines()[0]) == ADD and prompt.endswith(turns)

    def answered(text, asked=asked):
        sample = Sample(
            tokens=list(text.encode()), log_probs=[0.0] * len(text), prompt_log_probs=None, finish="stop", error=None
        )
        return completion(asked, served, [sample], "chat-1")["choices"][0]

    calls = '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call> <tool_call>{"name": "now"}</tool_call>'
    choice = answered(f"Wait.\n{calls}")
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Wait."
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [{"name": "add", "arguments": '{"a": "é"}'}, {"name": "now", "arguments": "{}"}]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    for text in ("no call", "<tool_call>{", "<tool_call>{nonsense}</tool_call>", '<tool_call>{"name": 1}</tool_call>'):
        choice = answered(text)
        assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"
    text = '<tool_call>{"name": "now"}</tool_call>'
    assert answered(text, asking())["message"]["content"] == text, "nobody asked for calls"
    assert answered(text)["message"]["content"] is None


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"tools": [{"name": "add"}]}, "tools: found"),
        ({"tools": {}}, "tools: found"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice: found 'required'"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "cannot be forced"),
        ({"response_format": {"type": "json_object"}}, "response_format: no form is enforced"),
    ],
)
def test_what_a_chat_cannot_have_is_refused(tmp_path, body, found):
    served, messages = chatting(tmp_path, TOOLS_TEMPLATE), [{"role": "user", "content": "a"}]
    with pytest.raises(ApiError, match=found) as refused:
        read_ask(json.dumps({"messages": messages, **body}).encode(), served, is_chat=True)
    assert refused.value.status == 400
    plain = chatting(tmp_path, "{{ tools | tojson }} <tool_call>{{ messages[0].content }}")
    with pytest.raises(ApiError, match="the chat template does not ask for calls"):
        read_ask(json.dumps({"messages": messages, "tools": [ADD]}).encode(), plain, is_chat=True)


def test_values_that_ask_for_what_is_done_anyhow_are_taken(tmp_path):
    body = {"response_format": {"type": "text"}, "modalities": ["text"], "top_k": -1, "prompt_cache_key": "a"}
    asked = read_ask(
        json.dumps({"messages": [{"role": "user", "content": "a"}], **body}).encode(), chatting(tmp_path), is_chat=True
    )
    assert "top_k" not in asked.params


def test_a_prompt_that_does_not_fit_is_told_by_the_code_of_openai():
    for body in ({"prompt": "a" * 64}, {"prompt": "a" * 321}, {"prompt": "a", "max_tokens": 64}):
        with pytest.raises(ApiError) as refused:
            ask(**body)
        assert refused.value.body()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("given", ["run", "run/checkpoints/step_000003", "run/checkpoints/step_000003/actor"])
def test_a_run_brings_the_tokenizer_of_its_latest_checkpoint(given, tmp_path, monkeypatch):
    for step in ("step_000002", "step_000003"):
        folder = tmp_path / "run/checkpoints" / step
        write_tokenizer(folder / "actor/assets")
        (folder / "job.json").touch()
        (folder / "actor/manifest.json").touch()
    found = find_tokenizer(argparse.Namespace(model=tmp_path / given, tokenizer=None))
    assert found is not None and found.path == tmp_path / "run/checkpoints/step_000003/actor/assets/tokenizer.json"


def test_the_memory_of_sequences_has_their_states_too():
    sizes = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4, "max_context": 64}
    heads = {"linear_key_heads": 2, "linear_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
    model = ModelConfig(**sizes, **heads, linear_layers=(0, 1, 2), linear_conv_kernel=4, vocab_size=32)
    line = memory_line(model, ParallelLayout(), [1000, 24], 0.5)
    # Keys and values of one layer, and of three layers three inputs of each channel and a matrix for each head.
    cache = (1024 * 2 * 64 + 2 * 3 * (3 * (2 * 2 * 8 + 4 * 16) + 4 * 8 * 16)) * 4
    assert line.endswith(f"key-value cache up to {format_bytes(cache)}")

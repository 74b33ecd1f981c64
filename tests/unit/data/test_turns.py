"""Turns of the assistant: the tokens and the mask are those that ``transformers`` makes of the same conversation."""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.data import DataConfig
from hybridflow.data.preferences import encode_responses
from hybridflow.data.problems import held_out_shape, training_shape
from hybridflow.data.prompts import Example, Solution, encode_solution
from hybridflow.data.shaping import Shape, Shaper, ends_of, examples_of
from hybridflow.data.tokenizer import Tokenizer, open_tokenizer
from hybridflow.errors import DataError
from hybridflow.recipe.load import load_recipe

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

MARKS = [
    *("<|end|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|head|>", "<|eot|>", "<|eom|>"),
    *("<|user|>", "<|assistant|>", "<|observation|>"),
]
# Behind ``generation`` stands what the assistant writes, for transformers to mark. For hybridflow it is text.
CALLS = (
    "{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}"
    "{%- endfor %}"
)
TOLD = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
)
CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}TOLD{%- elif m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' }}{%- generation %}SAID{{- '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}BEGIN{%- endif %}"
).replace("TOLD", TOLD)
QWEN2_5 = CHATML.replace("SAID", "{{- m.content }}" + CALLS).replace("BEGIN", "")
# Reasoning stands behind the last question of the user alone.
QWEN3 = "{%- set ns = namespace(asked=0) %}{%- for m in messages %}{%- if m.role == 'user' %}" + (
    "{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}"
    + CHATML.replace(
        "SAID",
        "{%- if loop.index0 > ns.asked and (loop.last or m.reasoning_content) %}"
        "{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}{{- m.content }}" + CALLS,
    ).replace("BEGIN", "{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}")
)
# What a call ends with is not what a text ends with; texts are stripped.
LLAMA = (
    "{{- '<|bos|>' }}{%- for m in messages %}{{- '<|head|>' + m.role + '<|head|>\n\n' }}{%- if m.role == 'assistant' %}"
    '{%- generation %}{%- if m.tool_calls %}{{- \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' '
    "+ (m.tool_calls[0].function.arguments | tojson) + '}<|eom|>' }}{%- else %}{{- (m.content | trim) + '<|eot|>' }}"
    "{%- endif %}{%- endgeneration %}{%- else %}{{- (m.content | trim) + '<|eot|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|head|>assistant<|head|>\n\n' }}{%- endif %}"
)
# The whole conversation has an end, too.
PHI = QWEN2_5.replace("BEGIN", "") + "{%- if not add_generation_prompt %}{{- '<|end|>' }}{%- endif %}"
# What ends a turn is the beginning of the next.
GLM = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|assistant|>' }}{%- generation %}"
    "{{- '\n' + m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- '<tool_call>' + call.function.name + '</tool_call>' }}{%- endfor %}"
    "{%- endgeneration %}{%- elif m.role == 'tool' %}{{- '<|observation|>\n' + m.content }}{%- else %}"
    "{{- '<|user|>\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
STOPS = {
    "<|im_end|>": [0, MARKS.index("<|im_end|>")],
    "<|eot|>": [0, MARKS.index("<|eot|>"), MARKS.index("<|eom|>")],
    "<|user|>": [0, MARKS.index("<|user|>"), MARKS.index("<|observation|>")],
}
CALL = {"type": "function", "function": {"name": "times", "arguments": {"a": 17, "b": 23}}}
TOOLS = [{"type": "function", "function": {"name": "times", "parameters": {"type": "object", "properties": {}}}}]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": "17*23?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "391"},
    {"role": "assistant", "content": "It is 391."},
    {"role": "user", "content": "And 2*3?"},
    {"role": "assistant", "content": "6, of course."},
]
REASONED = [{**each, "reasoning_content": "let me see"} if each["role"] == "assistant" else each for each in TALK]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of one tokenizer, by what ends a turn."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=MARKS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(each) for each in (TALK, TOOLS, REASONED)], trainer)
    folder = tmp_path_factory.mktemp("tokenizers")
    for number, stops in enumerate([*STOPS.values(), [0]]):
        (folder / f"{number}").mkdir()
        tokenizer.save(str(folder / f"{number}" / "tokenizer.json"))
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": MARKS[0]}
        (folder / f"{number}" / "tokenizer_config.json").write_text(json.dumps(named))
        (folder / f"{number}" / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return {end: folder / f"{number}" for number, end in enumerate([*STOPS, ""])}


def learned(
    row: dict[str, Any], template: str, folder: Path, kind: str = "problems", **data: Any
) -> tuple[Example, list[Any]]:
    """What is learned of a row: its solution, or the responses of a pair, in tokens."""
    tokenizer: Tokenizer = open_tokenizer(folder)
    shape = Shape(
        data=DataConfig(train="", **data),
        kind=kind,
        is_imitating=kind == "problems",
        needs_answer=False,
        template=template,
        tokenizer=str(tokenizer.path),
    )
    shaper = Shaper(shape)
    try:
        found = shaper(row, "f:1")
        assert found is not None
        (one,) = examples_of(found.row, "f:1", found.begins, shape)
        ends = ends_of(one, shape, tokenizer)
        if kind == "problems":
            return one, [encode_solution(one, tokenizer, max_context=999, ends=ends)]
        return one, list(encode_responses(one, tokenizer, max_context=999, ends=ends))
    finally:
        shaper.close()


their_tokenizer = functools.lru_cache(transformers.AutoTokenizer.from_pretrained)


def theirs(messages: list[dict[str, Any]], template: str, folder: Path, **kwargs: Any) -> tuple[list[int], list[int]]:
    """Tokens of a conversation, and 1 on those that the assistant writes."""
    found = their_tokenizer(folder).apply_chat_template(
        messages, TOOLS, chat_template=template, return_dict=True, return_assistant_tokens_mask=True, **kwargs
    )
    return found["input_ids"], found["assistant_masks"]


def last_run(mask: list[int]) -> tuple[int, int]:
    """The first token of the last turn, and the one behind it."""
    end = len(mask) - mask[::-1].index(1)
    return end - next((n for n, each in enumerate(mask[:end][::-1]) if not each), end), end


EVERY_TEMPLATE = pytest.mark.parametrize(
    ("template", "end"), [(QWEN2_5, "<|im_end|>"), (LLAMA, "<|eot|>"), (PHI, "<|im_end|>"), (GLM, "<|user|>")]
)


@EVERY_TEMPLATE
def test_all_turns_are_learned_as_transformers_marks_them(template, end, folders):
    for length in (5, 7):
        ids, mask = theirs(TALK[:length], template, folders[end])
        one, (found,) = learned(
            {"messages": TALK[:length], "tools": TOOLS}, template, folders[end], learned_turns="all"
        )
        tokens = [*found.prompt, *found.tokens]
        written = [0] * len(found.prompt) + [int(each) for each in found.is_written]
        if template is GLM:
            # transformers does not mark what ends a turn, since it is the beginning of the next.
            expected = [
                int(a or (b and token in STOPS[end])) for a, b, token in zip(mask, [0, *mask], ids, strict=False)
            ]
            assert (tokens[:-1], written[:-1]) == (ids, expected) and tokens[-1] == STOPS[end][1]
        else:
            num = last_run(mask)[1]
            assert (tokens, written) == (ids[:num], mask[:num])
        assert one.answer == TALK[length - 1]["content"], "a reward reads the text"
        assert len(list(itertools.groupby(written))) == 2 * (length // 2), "observed, written, observed, written …"


@EVERY_TEMPLATE
@pytest.mark.parametrize("length", [3, 5, 7])
def test_the_last_turn_is_learned_as_transformers_marks_it(template, end, length, folders):
    """With a call of tools as the last turn, too; alone, and as the better response of a pair."""
    ids, mask = theirs(TALK[:length], template, folders[end])
    first, num = last_run(mask)
    _, (found,) = learned({"messages": TALK[:length], "tools": TOOLS}, template, folders[end])
    tokens = [*ids[first:num], STOPS[end][1]] if template is GLM else ids[first:num]
    assert (list(found.prompt), list(found.tokens)) == (ids[:first], tokens)
    assert all(found.is_written)
    other = [{"role": "assistant", "content": "No."}]
    pair = {"prompt": TALK[: length - 1], "chosen": TALK[length - 1 : length], "rejected": other, "tools": TOOLS}
    _, responses = learned(pair, template, folders[end], kind="pairs")
    assert [list(each.prompt) for each in responses] == [ids[:first]] * 2
    assert list(responses[0].tokens) == tokens


@pytest.mark.parametrize("field", ["messages", "completion"])
def test_reasoning_is_learned_as_the_template_writes_it(field, folders):
    folder, talk = folders["<|im_end|>"], REASONED[:5]
    row = {"messages": talk} if field == "messages" else {"prompt": talk[:2], "completion": talk[2:]}
    ids, mask = theirs(talk, QWEN3, folder)
    one, (found,) = learned({**row, "tools": TOOLS}, QWEN3, folder, learned_turns="all")
    num = last_run(mask)[1]
    assert [*found.prompt, *found.tokens] == ids[:num]
    assert [0] * len(found.prompt) + [int(each) for each in found.is_written] == mask[:num]
    assert one.turns[0].startswith("<think>\nlet me see\n</think>") and one.answer == "It is 391."
    # Without thinking the template writes the empty thought into the prompt, and text alone is learned.
    row = {"messages": TALK[:2] + TALK[4:5]}
    for kwargs, thought in (({}, "<think>\n\n</think>\n\n"), ({"enable_thinking": False}, "")):
        one, _ = learned(row, QWEN3, folder, chat_template_kwargs=kwargs)
        assert one.turns == (f"{thought}It is 391.<|im_end|>",)


def test_of_a_prompt_with_a_completion_the_turns_of_the_completion_are_learned(folders):
    folder = folders["<|im_end|>"]
    ids, mask = theirs(TALK, QWEN2_5, folder)
    for completion in (TALK[6:], TALK[4:], TALK[2:], TALK):
        given = {"prompt": TALK[: 7 - len(completion)] or TALK[:2], "completion": completion, "tools": TOOLS}
        _, (found,) = learned(given, QWEN2_5, folder, learned_turns="all")
        assert [*found.prompt, *found.tokens] == ids[: len(found.prompt) + len(found.tokens)]
        num_turns = sum(each["role"] == "assistant" for each in completion)
        assert len([1 for flag, _ in itertools.groupby(found.is_written) if flag]) == num_turns


def test_a_template_that_writes_earlier_turns_otherwise_is_refused_for_all_of_them(folders):
    folder = folders["<|im_end|>"]
    with pytest.raises(DataError, match=re.escape("f:1: field 'messages'[2]: the chat template writes this message ")):
        learned({"messages": REASONED, "tools": TOOLS}, QWEN3, folder, learned_turns="all")
    ids, mask = theirs(REASONED, QWEN3, folder)
    first, num = last_run(mask)
    _, (found,) = learned({"messages": REASONED, "tools": TOOLS}, QWEN3, folder)
    assert (list(found.prompt), list(found.tokens)) == (ids[:first], ids[first:num])


def test_a_turn_without_an_end_of_its_own_ends_as_a_response_does(folders):
    row, folder = {"messages": TALK[:5], "tools": TOOLS}, folders[""]
    one, (found,) = learned(row, QWEN2_5, folder)
    assert one.turns == ("It is 391.",) and found.tokens[-1] == 0, "<|im_end|> ends no response of this model"
    with pytest.raises(DataError, match=r"'messages'\[2\]: .*no token that ends a response.*eos_token_id"):
        learned(row, QWEN2_5, folder, learned_turns="all")


@pytest.mark.parametrize(
    ("template", "message", "says"),
    [
        (QWEN2_5.replace(CALLS, ""), TALK[2], "has a call of the tool 'times', which the chat template does not"),
        (QWEN2_5, REASONED[4], "has 'reasoning_content', which the chat template does not"),
        (LLAMA, {**TALK[2], "content": "I ask."}, "has 'content', which the chat template does not"),
        (QWEN3, {**TALK[4], "content": "<think>I know.</think>391"}, ""),
        (
            QWEN2_5 + "{%- if add_generation_prompt %}{{- '<think>\n' }}{%- endif %}",
            TALK[4],
            r"the chat template does not go on with this message .*expected .*<think>\\n', found .*It is 391",
        ),
        # It begins the thought, and the message has the thought as a part of its text.
        (
            QWEN2_5 + "{%- if add_generation_prompt %}{{- '<think>' }}{%- endif %}",
            {**TALK[4], "content": "<think>I know.</think>391"},
            "",
        ),
    ],
)
def test_what_the_template_leaves_out_is_refused(template, message, says, folders):
    row = {"messages": [TALK[1], message]}
    if not says:
        one, _ = learned(row, template, folders["<|im_end|>"])
        assert one.prompt.partition("assistant\n")[2] + one.turns[0] in (
            "<think>I know.</think>391<|im_end|>",
            "<think>\n\n</think>\n\n<think>I know.</think>391<|im_end|>",
        )
        return
    with pytest.raises(DataError, match=rf"^f:1: field 'messages'\[1\]: {says}"):
        learned(row, template, folders["<|im_end|>"])


def test_a_solution_of_the_row_comes_first(folders):
    row = {"messages": TALK[:3], "tools": TOOLS, "solution": "391"}
    one, (found,) = learned(row, QWEN2_5, folders["<|im_end|>"], learned_turns="all")
    assert one.turns == ("391",) and isinstance(found, Solution)


def test_held_out_rows_whose_responses_are_scored_give_the_prompt_that_their_answer_belongs_to():
    for options, turns in (([], "last"), (["reward.function=null", "actor.rollout=null"], "all")):
        recipe = load_recipe("sft", ["data.learned_turns=all", *options])
        shape = training_shape(recipe, None)
        assert (shape.data.learned_turns, held_out_shape(shape, recipe).data.learned_turns) == ("all", turns)

"""Chat templates of others: what they may do, and that they cannot hang, fill the memory, or reach out."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from hybridflow.config.data import DataConfig
from hybridflow.data import chat
from hybridflow.data.chat import Chat, render_chat
from hybridflow.data.preferences import encode_responses
from hybridflow.data.prompts import encode_solution
from hybridflow.data.rows import object_of, plain_row, with_roles
from hybridflow.data.shaping import Shape, Shaper, ends_of, examples_of
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.errors import DataError
from tests.support.hf_models import END, PAD, START, write_tokenizer

MESSAGES = [{"role": "user", "content": "1+1="}]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


SAYS = {name: {"role": "assistant", "content": text} for name, text in (("chosen", "2"), ("rejected", "3"))}
ENDLESS = "more than 1 s or 512 MiB"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", ENDLESS),
        ("{{ 'a' * 10**10 }}", "MemoryError"),
        ("{{ 'a' | center(10**10) }}", "MemoryError"),
        ("{{ '%09999999999d' | format(1) }}", "fails: "),
        ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "Error"),
        ("{{ 9**(9**(9**9)) }}", ENDLESS),
        ("{{ 'a' * 2000000 }}", "made 2000000 characters, more than 1048576"),
        ("{{ range(10**9) | list }}", "OverflowError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('touch reached') }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "fails: "),
        ("{% import 'os' as os %}", "fails: "),
        ("{{ open('/etc/passwd').read() }}", "UndefinedError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('no') }}", "refuses the messages: no"),
        ("{{ raise_exception('x' * 10**8) }}", "refuses the messages: x{500}$"),
        ("{{ raise_exception(['x' * 10**8]) }}", "refuses the messages: \\['x{498}$"),
        ("{{ messages['x' * 10**8].content.content }}", "UndefinedError.{,600}$"),
        ("{{ '\\ud800' }}", "half of a surrogate pair"),
        ("{{ ", "TemplateSyntaxError"),
    ],
)
def test_hostile_templates(template, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if found == ENDLESS:
        monkeypatch.setattr(chat, "_RENDER_S", 1.0)
    one = Chat(template, {})
    begin_s = time.monotonic()
    with pytest.raises(DataError, match=found):
        one.render(MESSAGES)
    assert time.monotonic() - begin_s < 60
    assert not list(tmp_path.iterdir())
    one.close()


def test_after_one_that_was_stopped_the_next_is_rendered(monkeypatch):
    # Of constants it would be reckoned when the template is read.
    power = "{% set n = messages | length + 7 %}{{ n**(n**(n**n)) }}"
    one = Chat("{% if messages | length > 1 %}" + power + "{% endif %}{{ messages[0].content }}", {})
    assert one.render(MESSAGES) == "1+1="
    with monkeypatch.context() as patch, pytest.raises(DataError, match="was stopped"):
        patch.setattr(chat, "_RENDER_S", 1.0)
        one.render(MESSAGES * 2)
    assert one.render(MESSAGES) == "1+1="
    long = [{"role": "user", "content": "é☃" * 400_000}]
    assert one.render(long) == "é☃" * 400_000, "longer than a pipe holds, both ways"
    one.close()


def test_its_process_ends_with_the_one_that_asked():
    program = (
        "import os; from hybridflow.data.chat import Chat; one = Chat('x', {}); one.render([]); "
        "print(one._process.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    end_s = time.monotonic() + 30
    while os.path.exists(f"/proc/{int(done.stdout)}") and _is_running(int(done.stdout)):
        assert time.monotonic() < end_s, "the process of the template lives on"
        time.sleep(0.05)


def test_an_answer_without_an_end_is_not_kept():
    one = Chat("{{ messages[0].content }}", {})
    one._max_answer_bytes = 1 << 17
    with pytest.raises(DataError, match="its process wrote more than 131072 bytes"):
        one.render([{"role": "user", "content": "x" * 300_000}])
    assert one.render(MESSAGES) == "1+1="
    one.close()


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def shaped(row, kind="problems", template=TEMPLATE, is_imitating=False, **data):
    config = DataConfig(train="", held_out="", **data)
    shape = Shape(data=config, kind=kind, template=template, is_imitating=is_imitating)
    shaper = Shaper(shape)
    try:
        found = shaper(row, "f:1")
        return examples_of(found.row, "f:1", found.begins, shape)
    finally:
        shaper.close()


def turn(speaker, text):
    return {"from": speaker, "value": text}


@pytest.mark.parametrize("read", [lambda row: object_of(json.dumps(row).encode()), plain_row, with_roles])
@pytest.mark.parametrize("name", ["conversations", "messages", "prompt"])
def test_turns_of_sharegpt_are_messages(read, name):
    row = read({name: [turn("system", "s"), turn("human", "q"), {**turn("gpt", "a"), "weight": 1}], "source": None})
    assert row[name][2] == {"role": "assistant", "content": "a", "weight": 1} and "source" not in row
    (one,) = shaped(row)
    assert (one.prompt, one.answer, one.solution) == ("[system]s[user]q[assistant]", "a", "a")


def test_a_prompt_goes_before_conversations_of_something_else():
    (one,) = shaped({"prompt": "q", "answer": "a", "conversations": [turn("observation", "x")]})
    assert (one.prompt, one.answer) == ("q", "a")
    with pytest.raises(DataError, match="no field 'prompt'"):
        shaped({"conversations": 3, "answer": "a"})


def test_what_a_row_of_messages_asks_and_answers():
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    (one,) = shaped({"messages": [*asked, {"role": "assistant", "content": "a"}]})
    assert (one.prompt, one.answer, one.solution, one.begins) == ("[system]s[user]q[assistant]", "a", "a", True)
    (one,) = shaped({"messages": asked, "answer": "b"})
    assert (one.prompt, one.answer, one.solution) == ("[system]s[user]q[assistant]", "b", None)
    (one,) = shaped({"prompt": asked, "answer": "b", "solution": "c"})
    assert (one.prompt, one.solution) == ("[system]s[user]q[assistant]", "c")
    (one,) = shaped({"messages": '[{"role": "user", "content": "q"}]', "answer": "b"})
    assert one.prompt == "[user]q[assistant]", "the list may be JSON text"
    (one,) = shaped({"prompt": "q", "messages": asked, "answer": "b"})
    assert (one.prompt, one.begins) == ("q", False), "a prompt that is text is taken as it is"
    (one,) = shaped({"prompt": "q", "answer": "b"}, prompt_as_message=True)
    assert (one.prompt, one.begins) == ("[user]q[assistant]", True)
    said = {"chosen": [{"role": "assistant", "content": "x"}], "rejected": [{"role": "assistant", "content": "y"}]}
    (one,) = shaped({"prompt": asked, **said}, kind="pairs")
    assert [each.text for each in one.responses] == ["x", "y"]


def test_a_row_has_variables_of_the_template_beside_those_of_the_settings():
    template = "{{ messages[0].content }}|{{ enable_thinking }}|{{ effort | tojson }}{{ add_generation_prompt }}"
    row = {"messages": [{"role": "user", "content": "q"}], "answer": "b"}
    settings = {"enable_thinking": False, "effort": {"most": 2, "words": ["a"]}}
    (one,) = shaped(row, template=template, chat_template_kwargs=settings)
    assert one.prompt == 'q|False|{"most": 2, "words": ["a"]}True'
    # Rows of a table have each other's columns.
    for given in ({"enable_thinking": True, "effort": None}, '{"enable_thinking": true}'):
        (one,) = shaped(row | {"chat_template_kwargs": given}, template=template, chat_template_kwargs=settings)
        assert one.prompt == 'q|True|{"most": 2, "words": ["a"]}True'
    for given, says in (({"messages": []}, "messages is set by hybridflow"), (3, "found 3, expected an object")):
        with pytest.raises(DataError, match=f"f:1: field 'chat_template_kwargs': {says}"):
            shaped(row | {"chat_template_kwargs": given}, template=template)


# As templates of models that call tools are written.
TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALLED = [
    {"role": "user", "content": "1+2=", "tool_calls": None},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_calls": None},
]


def test_calls_of_tools_are_rendered_as_transformers_renders_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(
            CALLED, tools, chat_template=TOOLS_TEMPLATE, add_generation_prompt=True, tokenize=False
        )
        for given in (tools, json.dumps(tools)):
            (one,) = shaped({"messages": CALLED, "tools": given, "answer": "3"}, template=TOOLS_TEMPLATE)
            assert one.prompt == expected and "<call>" in expected and ("<tools>" in expected) == (tools is not None)
    without_content = [CALLED[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, CALLED[2]]
    (one,) = shaped({"messages": without_content, "answer": "3"}, template=TOOLS_TEMPLATE)
    assert "[assistant]<call>" in one.prompt


# How templates of models take the arguments of a call, and whether as an object.
ARGUMENTS = [
    ("{{ c.function.arguments | tojson }}", True),  # Qwen2.5, Llama 3
    ("{{ c['function']['arguments']|tojson(ensure_ascii=False) }}", True),
    (
        "{% set f = c.function %}{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}"
        "{% endif %}",  # Qwen3, Kimi
        True,
    ),
    ("{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}", True),  # Qwen3-Coder
    (
        "{% set tc = c.function %}{% set _args = tc.arguments %}{% for k, v in _args.items() %}{{ k }}={{ v }};"
        "{% endfor %}",  # GLM
        True,
    ),
    ("{% set out = c.function | tojson %}{{ out[:-1] }}", True),  # Mistral
    ("{{ m.tool_calls | tojson }}", True),
    ("{{ '```json' + c['function']['arguments'] + '```' }}", False),  # DeepSeek
    ("{{ tools[0].function | tojson }}{{ c.function.arguments }}", False),
]


@pytest.mark.parametrize(("takes", "as_object"), ARGUMENTS)
def test_arguments_that_are_json_in_a_string_are_rendered_as_transformers_renders_objects(takes, as_object, tmp_path):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}" + takes + ("{% endfor %}{% endfor %}")
    )
    object_of = {"a": 1, "b": ["\u00e9", None]}
    text = json.dumps(object_of, ensure_ascii=False)

    def called(arguments):
        call = {**CALL, "function": {"name": "add", "arguments": arguments}}
        return [
            MESSAGES[0],
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "3"},
        ]

    expected = theirs.apply_chat_template(
        called(object_of if as_object else text), TOOLS, chat_template=template, tokenize=False
    )
    tokenizer = open_tokenizer(tmp_path)
    for given in (text, object_of) if as_object else (text,):
        row = {"messages": called(given), "tools": TOOLS, "answer": "3"}
        (one,) = shaped(row, template=template)
        assert one.prompt == render_chat(template, tokenizer, called(given), TOOLS) == expected
    # What is no JSON, or no call, is the template's matter.
    if takes == ARGUMENTS[0][0]:
        (one,) = shaped({"messages": called("{a"), "answer": "3"}, template=template)
        assert one.prompt == '1+1="{a"3'


ENDS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}END{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("end", "stops", "index"),
    [
        (f"{PAD}1", [0, 2], 2),
        (END, [0, 2], 0),
        # What the template writes ends no response, or there is one end alone.
        (f"{START}", [0, 2], 0),
        (PAD, [0], 0),
    ],
)
def test_a_response_ends_as_its_template_ends_a_turn(end, stops, index, tmp_path):
    """The tokens are those of transformers, up to the one that ends the turn, if it is one that ends a response."""
    transformers = pytest.importorskip("transformers")
    template = ENDS.replace("END", end)
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    tokenizer = open_tokenizer(tmp_path)
    rows = {
        "problems": {"messages": [*MESSAGES, {"role": "assistant", "content": "2"}]},
        "pairs": {"prompt": MESSAGES, **{name: [SAYS[name]] for name in SAYS}},
    }
    for kind, row in rows.items():
        (one,) = shaped(row, kind=kind, template=template, is_imitating=kind == "problems")
        shape = Shape(data=DataConfig(train=""), kind=kind, template=template)
        ends = ends_of(one, shape, tokenizer)
        if kind == "problems":
            solution = encode_solution(one, tokenizer, max_context=64, ends=ends)
            found = [("2", solution.prompt, solution.tokens)]
        else:
            pair = encode_responses(one, tokenizer, max_context=64, ends=ends)
            found = [(text, each.prompt, each.tokens) for text, each in zip("23", pair, strict=True)]
        for text, prompt, tokens in found:
            assert tokens == (*tokenizer.encode(text), index)
            if index == 2 or end == END:
                theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
                    [*MESSAGES, {"role": "assistant", "content": text}], chat_template=template, return_dict=False
                )
                assert [*prompt, *tokens] == theirs[: len(prompt) + len(tokens)]
    (plain,) = shaped({"prompt": "1+1=", "answer": "2"}, template=template)
    assert ends_of(plain, shape, tokenizer).end_id is None, "no template made this prompt"


@pytest.mark.parametrize(
    ("prompt", "found", "remedy"),
    [
        (MESSAGES, "holds messages", "give the prompt as text"),
        ("1+1=", "data.prompt_as_message=true makes a message of its prompt", "data.prompt_as_message=false"),
    ],
)
def test_where_no_template_is_the_remedy_fits_the_row(prompt, found, remedy):
    says = (
        f"f:1: {found}, and the tokenizer has no chat template; set data.chat_template to a file with one, or {remedy}"
    )
    with pytest.raises(DataError, match=f"^{re.escape(says)}$"):
        shaped({"prompt": prompt, "answer": "2"}, template=None, prompt_as_message=True)


def test_a_text_that_has_its_end_gets_no_second_one(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    row = {"prompt": "1+1=", "solution": [f"2{END}", "+1", f"3{END}"], "answer": "3"}
    (one,) = shaped(row, is_imitating=True)
    expected = [token for text in (f"2{END}", "+1", f"3{END}") for token in tokenizer.encode(text)]
    assert encode_solution(one, tokenizer, max_context=64).tokens == tuple(expected)
    (pair,) = shaped({"prompt": "1+1=", "chosen": f"2{END}", "rejected": "3"}, kind="pairs")
    found = [each.tokens for each in encode_responses(pair, tokenizer, max_context=64)]
    assert found == [tuple(tokenizer.encode(f"{text}{END}")) for text in "23"]


def test_a_call_of_tools_is_no_answer():
    row = {"messages": CALLED[:2], "answer": "3"}
    (one,) = shaped(row, template=TOOLS_TEMPLATE)
    assert (one.prompt, one.answer, one.solution) == ("[user]1+2=[assistant]", "3", None)
    (one,) = shaped({**row, "solution": "<call>"}, template=TOOLS_TEMPLATE, is_imitating=True)
    assert (one.prompt, one.solution) == ("[user]1+2=[assistant]", "<call>")
    with pytest.raises(DataError, match="f:1: no field 'answer'"):
        shaped({"messages": CALLED[:2]}, template=TOOLS_TEMPLATE)
    with pytest.raises(DataError, match="f:1: field 'completion': ends with a call of tools"):
        shaped({"prompt": CALLED[:1], "completion": CALLED[1:2]}, template=TOOLS_TEMPLATE)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_beside_the_text_of_a_response_is_not_left_out_without_a_word(name):
    asked, said = {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3", name: "one and two"}
    with pytest.raises(DataError, match=rf"f:1: field 'messages'\[1\]: has '{name}', which the chat template does not"):
        shaped({"messages": [asked, said]}, is_imitating=True)
    pair = {"prompt": [asked], "chosen": [said], "rejected": [{**said, "content": "4", name: ""}]}
    with pytest.raises(DataError, match=rf"'chosen'\[0\]: has '{name}', .*the response as text in the field of the"):
        shaped(pair, kind="pairs")
    (one,) = shaped({"messages": [asked, said], "solution": "<think>one and two</think>3"}, is_imitating=True)
    assert one.solution == "<think>one and two</think>3"
    (one,) = shaped({"messages": [asked, said]})
    assert one.answer == "3", "a reward reads the text"
    assert len(shaped({**pair, "chosen": [{**said, name: None}]}, kind="pairs")) == 1


@pytest.mark.parametrize("tools", ["search, sum", 3, {"name": "sum"}])
def test_tools_that_are_no_list_are_refused(tools):
    with pytest.raises(DataError, match=r"f:1: field 'tools': .*rename the field"):
        shaped({"messages": CALLED, "tools": tools, "answer": "3"})
    (one,) = shaped({"messages": CALLED, "tools": "", "answer": "3"}, template=TOOLS_TEMPLATE)
    assert "<tools>" not in one.prompt


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": []}, "f:1: field 'messages': found [], expected a list of messages"),
        ({"messages": "[{"}, "f:1: field 'messages': not valid JSON"),
        ({"messages": [{"role": "user"}]}, "f:1: field 'messages'[0]: content: found None"),
        ({"messages": [{"content": "q"}]}, "f:1: field 'messages'[0]: found {'content': 'q'}, expected an object with"),
        ({"messages": ["q"]}, "f:1: field 'messages'[0]: found 'q'"),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "'messages': the assistant's message is the only one",
        ),
        ({"messages": 7}, "f:1: field 'messages': found 7"),
        (
            with_roles({"conversations": [turn("human", "q"), turn("observation", "a")]}),
            "f:1: field 'conversations': found a turn from 'observation', expected human, gpt or system",
        ),
        ({"messages": [{"role": "user", "content": "q"}]}, "f:1: no field 'answer'"),
        ({"prompt": [1], "answer": "b"}, "f:1: field 'prompt'[0]: found 1"),
        ({"prompt": {"role": "user"}, "answer": "b"}, "f:1: field 'prompt': expected text, found {'role': 'user'}"),
    ],
)
def test_messages_that_are_none(row, says):
    with pytest.raises(DataError) as caught:
        shaped(row)
    assert says in str(caught.value)

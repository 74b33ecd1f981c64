"""Tokenizers of Hugging Face directories: what ``transformers`` makes of the same files, and what is refused."""

import json
import shutil
import subprocess
import sys

import pytest

from hybridflow.config.data import DataConfig
from hybridflow.data import trial
from hybridflow.data.chat import chat_template, render_chat
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.prompts import Example, prompt_tokens
from hybridflow.data.shaping import Shape, Shaper
from hybridflow.data.tokenizer import check_same_pieces, open_tokenizer, tokenizer_in
from hybridflow.errors import DataError
from hybridflow.exit_status import REQUEST, exit_status

transformers = pytest.importorskip("transformers")
from tests.support.hf_models import END, PAD, START, write_tokenizer  # noqa: E402

TEXTS = ["12+34=46", "7", " 5 +5", "29+29=58 0"]


@pytest.mark.parametrize("has_start", [False, True])
def test_tokens_are_those_of_transformers(tmp_path, has_start):
    write_tokenizer(tmp_path, has_start=has_start, pad_token=PAD)
    ours, theirs = open_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs) and ours.pieces()[ours.eos_id] == END
    assert (ours.eos_id, ours.pad_id) == (theirs.eos_token_id, theirs.pad_token_id)
    assert ours.bos_id == (theirs.convert_tokens_to_ids(START) if has_start else None)
    for text in TEXTS:
        prompt = prompt_tokens(Example(prompt=text, answer="", place=text), ours)
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert list(prompt) == theirs(text)["input_ids"], "a prompt begins as the tokenizer begins a text"
        assert ours.decode([*prompt, ours.eos_id, ours.pad_id, ours.vocab_size]) == text == ours.decode(ids)


@pytest.mark.parametrize(
    ("named", "generation", "config", "stops"),
    [
        ({}, None, None, (0,)),  # <|end|> is the first token
        ({}, {"eos_token_id": [5, 0, 6]}, {"eos_token_id": 9}, (0, 5, 6)),
        ({}, {"eos_token_id": 5}, None, (0, 5)),
        ({}, {}, {"eos_token_id": 7}, (0, 7)),
        ({"eos_token": {"content": START}}, None, None, (1,)),
        ({"eos_token": None}, {"eos_token_id": [6, 5]}, None, (6, 5)),
    ],
)
def test_what_ends_a_response(tmp_path, named, generation, config, stops):
    write_tokenizer(tmp_path, **named)
    for name, values in (("generation_config.json", generation), ("config.json", config)):
        if values is not None:
            (tmp_path / name).write_text(json.dumps(values))
    tokenizer = open_tokenizer(tmp_path)
    assert (tokenizer.stop_ids, tokenizer.eos_id, tokenizer.pad_id) == (stops, stops[0], stops[0])


def test_directory_with_a_sentencepiece_model_alone(tmp_path):
    trained = train_tokenizer(["12+34=46"], path=tmp_path / "tokenizer.model", vocab_size=64)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode("34") == trained.encode("34") and tokenizer.bos_id == 1
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (2, (2, 5))


def test_a_model_directory_keeps_its_tokenizer_among_the_assets(tmp_path):
    assert tokenizer_in(tmp_path) is None
    write_tokenizer(tmp_path / "assets")
    assert tokenizer_in(tmp_path) == tmp_path / "assets/tokenizer.json"
    assert open_tokenizer(tmp_path).eos_id == 0


def test_models_of_another_tokenizer_are_refused(tmp_path):
    write_tokenizer(tmp_path / "one")
    one = open_tokenizer(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "longer")
    added = transformers.AutoTokenizer.from_pretrained(tmp_path / "one")
    added.add_special_tokens({"pad_token": "<|fill|>"})
    added.save_pretrained(tmp_path / "longer")
    longer = open_tokenizer(tmp_path / "longer")
    assert longer.vocab_size == one.vocab_size + 1
    check_same_pieces(one, longer, whose="x")
    check_same_pieces(longer, one, whose="x")
    other = train_tokenizer(["12+34=46"], path=tmp_path / "tokenizer.model", vocab_size=64)
    with pytest.raises(DataError, match=r"reward\.model: token 0 is '<pad>' in .*, and '<\|end\|>' in .*one tokenizer"):
        check_same_pieces(one, other, whose="reward.model")


@pytest.mark.parametrize("name", ["<|reserved_special_token_7|>", "<unused7>", "[control_7]", "<|placeholder7|>"])
def test_a_token_in_reserve_may_be_renamed(tmp_path, name):
    for folder, added in (("base", name), ("renamed", "<think>")):
        write_tokenizer(tmp_path / folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        tokenizer.add_tokens([added], special_tokens=True)
        tokenizer.save_pretrained(tmp_path / folder)
    base, renamed = (open_tokenizer(tmp_path / each) for each in ("base", "renamed"))
    assert base.vocab_size == renamed.vocab_size and base.pieces() != renamed.pieces()
    check_same_pieces(renamed, base, whose="x")
    check_same_pieces(base, renamed, whose="x")


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", None, "found neither tokenizer.json nor tokenizer.model"),
        ("tokenizer.json", '{"model": 3}', "tokenizer.json: cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: found JSONDecodeError"),
        ("tokenizer_config.json", "[]", "found list, expected a JSON object"),
        ("tokenizer_config.json", None, "knows no end of sequence"),
        ("tokenizer_config.json", '{"eos_token": "</s>"}', "has no token '</s>', the eos_token"),
    ],
)
def test_damaged_directory_is_named(tmp_path, file, content, says):
    write_tokenizer(tmp_path)
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_text(content)
    with pytest.raises(DataError) as caught:
        open_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and says in str(caught.value)


def test_without_the_package_the_extra_is_named(tmp_path):
    write_tokenizer(tmp_path)
    code = "import sys; sys.modules['tokenizers'] = None\n"
    code += "from hybridflow.data.tokenizer import open_tokenizer\nopen_tokenizer(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert "DataError" in done.stderr and "pip install 'hybridflow[hf]'" in done.stderr


def replacing(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


CRAFTED = {
    "panic of a normalizer": ("normalizer", replacing({"String": ""}, "x"), "PanicException"),
    "panic of a regular expression": ("normalizer", replacing({"Regex": ""}, "x"), "PanicException"),
    "panic when loaded": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}, "PanicException"),
    "texts that double without end": (
        "normalizer",
        {"type": "Sequence", "normalizers": [replacing({"String": "a"}, "aa")] * 60},
        "its trial was stopped, it takes more than",
    ),
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/hybridflow/tokenizers"


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_tokenizers_end_in_a_process_of_their_own(tmp_path, cache, monkeypatch, name):
    key, value, says = CRAFTED[name]
    monkeypatch.setattr(trial, "_CPU_S", 1)
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, key: value}))
    with pytest.raises(DataError, match=f"tokenizer .*tokenizer.json: cannot be read: {says}") as caught:
        open_tokenizer(tmp_path)
    assert exit_status(caught.value) == REQUEST and not list(cache.iterdir())


def test_a_panic_on_a_text_is_an_error(tmp_path, cache, monkeypatch):
    """The trial cannot try all texts."""
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    monkeypatch.setattr(trial, "_problem", lambda content: None)
    with pytest.raises(DataError, match="tokenizer.json: cannot encode a text: PanicException: chunk size"):
        open_tokenizer(tmp_path)


def test_a_trial_is_made_once_and_remembered_where_only_the_user_writes(tmp_path, cache, monkeypatch):
    write_tokenizer(tmp_path)
    tried = []
    monkeypatch.setattr(trial, "_problem", tried.append)
    open_tokenizer(tmp_path)
    open_tokenizer(tmp_path)
    assert len(tried) == 1 and len(list(cache.iterdir())) == 1
    cache.chmod(0o777)
    open_tokenizer(tmp_path)
    assert len(tried) == 2, "another user could have written there"


def test_ids_without_tokens_are_no_vocabulary(tmp_path):
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["5"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"tokenizer.json: has \d+ tokens with ids up to 4294967295"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("has_decoder", [False, True])
def test_special_tokens_of_older_directories_are_those_of_transformers(tmp_path, has_decoder):
    write_tokenizer(tmp_path, has_start=True)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    added = settings.pop("added_tokens_decoder", None) or {"1": {"content": START, "special": True}}
    settings["chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    settings |= {"eos_token": START} | ({"added_tokens_decoder": added} if has_decoder else {})
    path.write_text(json.dumps(settings))
    special = {"bos_token": START, "eos_token": {"content": END}, "pad_token": PAD}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    ours, theirs = open_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "12+34="}]
    text = theirs.apply_chat_template(messages, tokenize=False)
    assert render_chat(chat_template(ours), ours, messages) == text
    assert ours.eos_id == theirs.eos_token_id and text.count(END) == (0 if has_decoder else 1)


def test_special_tokens_that_the_model_has_no_rows_for_are_left_out(tmp_path):
    write_tokenizer(tmp_path, more=["<fill>", "<image>"], pad_token="<fill>")
    whole, known = open_tokenizer(tmp_path), open_tokenizer(tmp_path, 40)
    assert (whole.vocab_size, whole.pad_id, whole.special_id("<image>")) == (42, 40, 41)
    assert whole.encode("1<image>")[-1] == 41
    assert (known.vocab_size, known.pad_id, known.special_id("<image>")) == (40, whole.eos_id, None)
    assert known.pieces() == {index: piece for index, piece in whole.pieces().items() if index < 40}
    assert known.encode("12+34=") == whole.encode("12+34=")
    for text in ("1<image>2", "1<image>2" * 9999):
        with pytest.raises(DataError, match="'<image>', and the model has no row for it; take it out"):
            known.encode(text)
    # Any text may have the last tokens of these.
    assert open_tokenizer(tmp_path, 39).vocab_size == 42
    write_tokenizer(tmp_path, more=["<over>"], eos_token="<over>")
    assert open_tokenizer(tmp_path, 40).vocab_size == 41


def test_a_template_whose_tokens_sentencepiece_would_spell_is_refused(tmp_path):
    tokenizer = train_tokenizer(["12+34=46 <s>x</s>"], path=tmp_path / "tokenizer.model", vocab_size=64)
    says = r"tokenizer.model: the chat template writes </s>, of which sentencepiece makes letters; put a tokenizer.json"
    with pytest.raises(DataError, match=says):
        render_chat("{% for m in messages %}{{ m.content }}</s>{% endfor %}", tokenizer, [{"content": "12"}])
    shape = Shape(
        data=DataConfig(train="", held_out=""),
        kind="problems",
        template="{{ messages[0].content }}</s>",
        tokenizer=str(tokenizer.path),
    )
    shaper = Shaper(shape)
    with pytest.raises(DataError, match=says):
        shaper({"messages": [{"role": "user", "content": "12"}], "answer": "3"}, "f:1")
    shaper.close()
    # What a message says is text.
    found = render_chat("{% for m in messages %}{{ m.content }}{% endfor %}", tokenizer, [{"content": "<s>x</s>"}])
    assert found == "<s>x</s>"

"""Stop and bad strings: whatever the tokenizer, the token at which a decoding of the whole would find them."""

from __future__ import annotations

import io
import os
import random

import pytest

from hybridflow.data.pieces import PieceTokenizer
from hybridflow.data.tokenizer import Tokenizer, open_tokenizer
from hybridflow.rollout.request import SamplingParams
from hybridflow.rollout.texts import GrowingText, Texts, Watch, text_before_stop, with_stop_tokens

LINES = [f"{a}+{b}={a + b} naïve €{b} 日本 the end." for a in range(30) for b in range(5)]


def by_pieces(folder, **settings) -> Tokenizer:
    """Sentencepiece, with or without pieces for single bytes and a space before the text."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        model_type="bpe",
        num_threads=1,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
        **settings,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return PieceTokenizer(folder / "tokenizer.model")


def by_bytes(folder) -> Tokenizer:
    """A fast tokenizer whose pieces are bytes, as GPT-2's."""
    return of_transformers(folder, "bytes")


def with_fallback(folder) -> Tokenizer:
    """A fast tokenizer of pieces with a space before them, and of bytes for the rest, as Llama 2's."""
    return of_transformers(folder, "fallback")


def of_words(folder) -> Tokenizer:
    """A fast tokenizer of parts of words, as BERT's."""
    return of_transformers(folder, "words")


def of_transformers(folder, kind: str) -> Tokenizer:
    tokenizers = pytest.importorskip("tokenizers")
    special, models, decoders = ["<end>", "<start>"], tokenizers.models, tokenizers.decoders
    if kind == "bytes":
        built = tokenizers.Tokenizer(models.BPE())
        built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        built.train_from_iterator(
            LINES,
            tokenizers.trainers.BpeTrainer(
                vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
            ),
        )
    elif kind == "fallback":
        pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"0123456789+=.the", "▁t", "▁the", "en"]
        built = tokenizers.Tokenizer(
            models.BPE({piece: index for index, piece in enumerate(dict.fromkeys(pieces))}, [], byte_fallback=True)
        )
        built.add_special_tokens(special)
        built.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        pieces = [*special, "[UNK]", "the", "end", "##ing", "##s", ".", ",", "'", "do", "n", "t", "日", "##本"]
        built = tokenizers.Tokenizer(
            models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")
        )
        built.add_special_tokens(special)
        built.decoder = decoders.WordPiece()
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return open_tokenizer(folder)


TOKENIZERS = {
    "pieces": lambda folder: by_pieces(folder, vocab_size=80, hard_vocab_limit=False, add_dummy_prefix=False),
    "pieces and bytes": lambda folder: by_pieces(folder, vocab_size=330, byte_fallback=True, character_coverage=0.98),
    "bytes": by_bytes,
    "fallback": with_fallback,
    "words": of_words,
}


def has_new(before: str, after: str, strings: list[str]) -> bool:
    """Whether a string stands in ``after`` and reaches beyond what both begin with; by looking everywhere."""
    num_same = len(os.path.commonprefix([before, after]))
    return any(
        after[end - len(string) : end] == string
        for string in strings
        for end in range(max(num_same + 1, len(string)), len(after) + 1)
    )


def sequence(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Tokens of words, in any order and broken anywhere, with those of no text and of no token among them."""
    tokens: list[int] = []
    while len(tokens) < 40:
        kind = rng.random()
        if kind < 0.55:
            ids = tokenizer.encode(rng.choice([" €5", "日本", "the end.", " naïve", "12+3", "don't"]))
            cut = rng.randrange(len(ids) + 1)
            tokens += ids[cut:] if rng.random() < 0.2 else ids
        elif kind < 0.9:
            tokens.append(rng.randrange(tokenizer.vocab_size))
        else:
            tokens.append(rng.choice([tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size]))
    return tokens


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_strings_are_found_at_the_token_that_completes_them(kind, tmp_path):
    tokenizer = TOKENIZERS[kind](tmp_path)
    texts, rng = Texts(tokenizer), random.Random(3)
    num_found = num_across = 0
    for _ in range(150):
        tokens = sequence(tokenizer, rng)
        whole = tokenizer.decode(tokens)
        strings = []
        for _ in range(3):
            start = rng.randrange(len(whole))
            string = whole[start : start + rng.randint(1, 9)]
            strings += [string] if "\ufffd" not in string else []
        strings = [*strings, " the", "€"]
        watch = Watch(texts, strings[:2], strings[2:])
        for place, token in enumerate(tokens):
            before, after = tokenizer.decode(tokens[:place]), tokenizer.decode(tokens[: place + 1])
            where = (kind, tokens[: place + 1], strings)
            assert watch.would_complete_bad(token) == has_new(before, after, strings[2:]), where
            is_stop = watch.add(token)
            assert is_stop == has_new(before, after, strings[:2]), where
            num_found += is_stop
            num_across += is_stop and not any(string in tokenizer.decode([token]) for string in strings[:2])
            if place == 20:
                # As one that goes on from what was sampled before.
                watch = Watch(texts, strings[:2], strings[2:], tokens[: place + 1])
    assert num_found > 100 and num_across > 30


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_growing_text_is_that_of_all_tokens(kind, tmp_path):
    tokenizer = TOKENIZERS[kind](tmp_path)
    texts, rng = Texts(tokenizer), random.Random(4)
    for _ in range(150):
        tokens, growing, place = sequence(tokenizer, rng), GrowingText(texts), 0
        while place < len(tokens):
            before, place = place, place + rng.randint(1, 3)
            assert growing.add(tokens[before:place]) == tokenizer.decode(tokens[:place]), (kind, tokens[:place])


def test_text_before_the_stop_string(tmp_path):
    tokenizer = TOKENIZERS["bytes"](tmp_path)
    tokens = tokenizer.encode("the end. €5 the end")
    # The stop string before it was passed by, and of several the first counts.
    assert text_before_stop(tokens, ["end", " the end", "nd"], tokenizer) == "the end. €5"
    assert text_before_stop([*tokens, tokenizer.eos_id], ["€"], tokenizer) == "the end. €5 the end"
    assert text_before_stop([], ["€"], tokenizer) == ""


SPECIAL = {"pieces": "<s>", "pieces and bytes": "<s>"}
TEXTS = ("the end", " ", "▁", "Ġ", "☃", "\n", "<0x0A>", "##ing", "[unused]", "<en", "5")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_name_of_a_special_token_stands_for_the_token(kind, tmp_path):
    tokenizer = TOKENIZERS[kind](tmp_path)
    name = SPECIAL.get(kind, "<start>")
    (index,) = (index for index, piece in tokenizer.pieces().items() if piece == name)
    assert tokenizer.decode([index]) == "" and index not in tokenizer.stop_ids
    given = SamplingParams(max_new_tokens=4, stop=(*TEXTS[:3], name, *TEXTS[3:]), stop_ids=tokenizer.stop_ids)
    made = with_stop_tokens(given, tokenizer)
    assert made.stop == TEXTS, "they are text, as whatever tokens they are written"
    assert made.stop_ids == (*tokenizer.stop_ids, index)
    assert with_stop_tokens(made, tokenizer) is made and with_stop_tokens(given, None) is given
    again = SamplingParams(max_new_tokens=4, stop=(name,), stop_ids=(index,))
    assert with_stop_tokens(again, tokenizer) == SamplingParams(max_new_tokens=4, stop_ids=(index,))
    # A response that such a token ended is as one that ended by itself.
    tokens = tokenizer.encode("the end")
    assert text_before_stop([*tokens, index], made.stop[1:], tokenizer) == tokenizer.decode(tokens)


class Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.num_decoded = tokenizer, 0
        self.pieces = tokenizer.pieces

    def decode(self, ids):
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids)


def test_looking_does_not_take_longer_as_a_response_grows(tmp_path):
    counting = Counting(TOKENIZERS["bytes"](tmp_path))
    tokens = counting.tokenizer.encode("the end. €5 日本" * 100)
    watch, growing = Watch(Texts(counting), ["never"], []), GrowingText(Texts(counting))
    for add in (watch.add, lambda token: growing.add([token])):
        counting.num_decoded = 0
        for token in tokens:
            add(token)
        assert len(tokens) > 500 and counting.num_decoded < 8 * len(tokens)

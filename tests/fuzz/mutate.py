"""Random changes of bytes, of which formats of text and of binary numbers both make sense."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Sequence

_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, 2**63 - 1, 2**63)
_FORMS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_DIGITS = re.compile(rb"\d+")
_TEXTS = (b"0", b"-1", b"1e999", b"NaN", b"9" * 20, b"9" * 5000, b"null", b"true", b'""', b"[]", b"{}", b'"\\ud800"')
_NOISE = (b"[" * 2000, b"{" * 500, b"\xff\xfe", b"\x00", b"\x1b[31m", b"\n", b"\xed\xa0\x80", b" " * 4096)
_MOST_BYTES = 1 << 17


def changed(rng: random.Random, data: bytes, others: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """Change some bytes, mostly few.

    Args:
        rng: Where the choices come from.
        data: A valid file.
        others: Files whose parts may be put into it.
        words: What means something in its format.
    """
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5, 8))):
        rng.choice(_CHANGES)(rng, found, others, words)
    return bytes(found[: max(_MOST_BYTES, 2 * len(data))])


def _place(rng: random.Random, data: bytearray) -> int:
    """Choose a place: headers and footers are at the ends."""
    near = min(len(data), 1024)
    return rng.choice((rng.randrange(len(data) + 1), rng.randrange(near + 1), len(data) - rng.randrange(near + 1)))


def _flip(rng: random.Random, data: bytearray, *_: object) -> None:
    if data:
        data[min(_place(rng, data), len(data) - 1)] ^= 1 << rng.randrange(8)


def _set_number(rng: random.Random, data: bytearray, *_: object) -> None:
    size, at = rng.choice(list(_FORMS)), _place(rng, data)
    number = rng.choice((*_NUMBERS, len(data), len(data) + 1, rng.getrandbits(64))) + rng.choice((0, 0, 1, -1))
    data[at : at + size] = struct.pack(rng.choice("<>") + _FORMS[size], number % (1 << 8 * size))


def _set_digits(rng: random.Random, data: bytearray, *_: object) -> None:
    found = list(_DIGITS.finditer(data))
    if found:
        start, stop = rng.choice(found).span()
        data[start:stop] = rng.choice((*_TEXTS, *(str(number).encode() for number in _NUMBERS)))


def _delete(rng: random.Random, data: bytearray, *_: object) -> None:
    at = _place(rng, data)
    del data[at : at + rng.choice((1, 2, 8, 64, 512))]


def _truncate(rng: random.Random, data: bytearray, *_: object) -> None:
    del data[_place(rng, data) :]


def _repeat(rng: random.Random, data: bytearray, *_: object) -> None:
    at = _place(rng, data)
    part = bytes(data[at : at + rng.choice((1, 4, 16, 64, 256))])
    data[at:at] = part * rng.choice((1, 1, 2, 16, 64))


def _move(rng: random.Random, data: bytearray, *_: object) -> None:
    start, size, at = _place(rng, data), rng.choice((1, 4, 8, 32, 128)), _place(rng, data)
    data[at : at + size] = data[start : start + size]


def _insert(rng: random.Random, data: bytearray, _: object, words: Sequence[bytes]) -> None:
    at = _place(rng, data)
    data[at:at] = rng.choice((*words, *_TEXTS, *_NOISE, rng.randbytes(rng.choice((1, 4, 16)))))


def _splice(rng: random.Random, data: bytearray, others: Sequence[bytes], _: object) -> None:
    other = rng.choice(others)
    start = rng.randrange(len(other) + 1)
    part = other[start : start + rng.choice((8, 64, 512))]
    at = _place(rng, data)
    data[at : at + len(part)] = part


_CHANGES = (_flip, _set_number, _set_digits, _delete, _truncate, _repeat, _move, _insert, _splice)

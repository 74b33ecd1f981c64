"""The order of data as a pure function, so that a checkpoint keeps nothing of it but a position.

The same on every machine and in every version of Python, which the standard library's shuffle is not.
"""

_MASK = 2**64 - 1
_ROUNDS = 6


def permuted(index: int, *, size: int, key: tuple[int, ...]) -> int:
    """Permute ``range(size)`` pseudo-randomly by a key, and return the place of ``index``, in constant time and memory.

    A Feistel network permutes the smallest square power of four that holds ``size``; walking its cycle from
    ``index`` until a number below ``size`` comes up keeps it a permutation.

    Args:
        index: In ``range(size)``.
        size: Number of items.
        key: What the permutation depends on, for instance seed and epoch.

    Paper: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
    """
    assert 0 <= index < size
    half = ((size - 1).bit_length() + 1) // 2
    round_keys = [mixed(*key, number) for number in range(_ROUNDS)]
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for round_key in round_keys:
            left, right = right, left ^ (mixed(round_key, right) >> (64 - half))
        index = (left << half) | right
        if index < size:
            return index


def mixed(*numbers: int) -> int:
    """Mix all numbers, in order, into 64 bits; each is absorbed by one round of SplitMix64.

    Paper: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state

"""Made-up problems: tasks small enough for a laptop whose right answers a program can check.

The rows of the training file carry a worked ``solution`` beside the right ``answer``. As in text found on the web, some
solutions are wrong, and wrong in the same way: they carry from the units exactly when they should not, as in 27+35=52
and 21+35=66. Supervised training imitates the slip; reinforcement learning, which sees the right answer, can mend it.
Or some ask the calculator of ``hybridflow.rollout.calculator``, and most guess; reinforcement learning finds out what
is worth more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridflow.config.data import ArithmeticConfig
from hybridflow.data.order import mixed, permuted
from hybridflow.errors import DataError
from hybridflow.observe.files import replace_file, writing

Row = dict[str, str | list[str]]

_SIGNS = {"add": "+", "multiply": "*"}
# Keeps the uses of one seed apart.
_WHICH, _ORDER, _SLIP, _TOOL = range(4)


def make_problems(spec: ArithmeticConfig, *, has_preferences: bool = False) -> tuple[list[Row], list[Row]]:
    """Make training and held-out problems, a function of ``spec`` alone.

    No problem stands in both, not even with its operands exchanged. ``spec.mistake_share`` is the expected share of
    wrong solutions among the training problems; every ``answer`` is right. ``spec.tool_share`` is the expected share of
    solutions that ask the calculator.

    Args:
        spec: How many problems, operands from 0 to ``max_operand``, and how many slips.
        has_preferences: Give two responses in the place of the answer; of additions.

    Returns:
        Rows ``{"prompt": "27+35=", "answer": "62", "solution": "52"}``, and rows without a solution. One that asks is
        a list: ``["[27+35]", "62;", "62"]``. Preferences have ``"chosen": "62", "rejected": "52"``, the right answer
        and the slip, where others have the answer.

    Raises:
        DataError: There are fewer different problems than asked for.
    """
    largest = spec.max_operand
    num_pairs = (largest + 1) * (largest + 2) // 2
    wanted = spec.num_train + spec.num_held_out
    if wanted > num_pairs:
        raise DataError(
            f"arithmetic: num_train={spec.num_train} + num_held_out={spec.num_held_out} = {wanted} problems, "
            f"but operands up to max_operand={largest} make only {num_pairs}; raise max_operand or ask for fewer"
        )
    train: list[Row] = []
    held_out: list[Row] = []
    for number in range(wanted):
        pair = permuted(number, size=num_pairs, key=(spec.seed, _WHICH))
        # Pairs (small, large) in order: the one at (s, l) has index l·(l+1)/2 + s.
        large = (math.isqrt(8 * pair + 1) - 1) // 2
        small = pair - large * (large + 1) // 2
        left, right = (small, large) if mixed(spec.seed, _ORDER, pair) % 2 else (large, small)
        problem = f"{left}{_SIGNS[spec.operation]}{right}"
        answer = str(left + right if spec.operation == "add" else left * right)
        row: Row = {"prompt": f"{problem}=", "answer": answer}
        if has_preferences:
            row = {"prompt": f"{problem}=", "chosen": answer, "rejected": str(wrong_carry(left, right))}
        if number >= spec.num_train:
            held_out.append(row)
        elif mixed(spec.seed, _TOOL, pair) < spec.tool_share * 2**64:
            train.append({**row, "solution": [f"[{problem}]", f"{answer};", answer]})
        else:
            slips = mixed(spec.seed, _SLIP, pair) < spec.mistake_share * 2**64
            train.append({**row, "solution": str(wrong_carry(left, right)) if slips else answer})
    return train, held_out


def wrong_carry(left: int, right: int) -> int:
    """Return the sum of someone who carries from the units exactly when they should not: 27 + 35 → 52, 21 + 35 → 66."""
    return left + right + (-10 if left % 10 + right % 10 >= 10 else 10)


def ensure_files(
    spec: ArithmeticConfig, *, train: str | Path, held_out: str | Path | None, has_preferences: bool = False
) -> None:
    """Write the two JSONL files where they are absent, or the first alone; one process calls this for all.

    Raises:
        DataError: A file is there and holds something else; or as ``make_problems``.
        WriteError: The file system refuses.
    """
    for path, content in _absent(spec, train, held_out, has_preferences=has_preferences):
        with writing(path, "choose another place"):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)


def check_files(
    spec: ArithmeticConfig, *, train: str | Path, held_out: str | Path | None, has_preferences: bool = False
) -> None:
    """Refuse what ``ensure_files`` refuses, and write nothing. Raises DataError."""
    for _ in _absent(spec, train, held_out, has_preferences=has_preferences):
        pass


def _absent(
    spec: ArithmeticConfig, train: str | Path, held_out: str | Path | None, *, has_preferences: bool
) -> Iterator[tuple[Path, bytes]]:
    """Yield path and content of each file that is absent. Raises DataError: one is there and holds something else."""
    problems = make_problems(spec, has_preferences=has_preferences)
    for name, rows in zip((train, held_out), problems, strict=True):
        if name is None:
            continue
        path, content = Path(name), to_jsonl(rows).encode()
        if not path.exists():
            yield path, content
        elif path.read_bytes() != content:
            raise DataError(
                f"{path}: is there already, and is not what data.arithmetic describes; "
                "remove the file to have it made anew, or set data.arithmetic=null to use it as it is"
            )


def to_jsonl(rows: Sequence[Row]) -> str:
    """Write one JSON object per line."""
    return "".join(json.dumps(row) + "\n" for row in rows)

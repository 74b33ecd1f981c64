"""Rows for ``data.train`` from what a run has sampled: what to imitate, pairs, or what is wanted and what is not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hybridflow.data.tokenizer import marked_text, special_names, start_of
from hybridflow.errors import ConfigError, DataError
from hybridflow.rollout.request import OBSERVED
from hybridflow.rollout.texts import text_before_stop

if TYPE_CHECKING:
    from hybridflow.data.tokenizer import Tokenizer
    from hybridflow.rollout.archive import Archived

KINDS = ("sft", "dpo", "kto")
Row = dict[str, Any]


class Export:
    """Makes rows of samples, and counts what it leaves out.

    A row's text ends with an end of sequence when it is learned from. So responses that were cut are left out, and the
    token or text that ended a response is no part of its row.

    Args:
        kind: ``sft``: of each prompt the response with the highest score; ``dpo``: of each group the responses with the
            highest and the lowest, where these differ; ``kto``: every response, which is wanted from ``min_score`` on.
        tokenizer: Tokenizer of the run.
        min_score: Lowest score of a solution, or of the better response of a pair; None: any. ``kto`` needs it.
        stop: ``rollout.stop`` of the run.

    Attributes:
        left_out: Reason -> how many samples, or groups.

    Raises:
        ConfigError: ``kto`` without ``min_score``.
    """

    def __init__(
        self, kind: str, tokenizer: Tokenizer, min_score: float | None = None, stop: Sequence[str] = ()
    ) -> None:
        if kind == "kto" and min_score is None:
            raise ConfigError("--as kto: which responses are wanted? give the lowest score of one with --min-score")
        self.left_out: Counter[str] = Counter()
        self._kind, self._tokenizer, self._min_score, self._stop = kind, tokenizer, min_score, stop
        self._names = special_names(tokenizer)

    def rows(self, samples: Iterable[Archived]) -> list[Row]:
        """Return the rows, in the order of the samples.

        Raises:
            DataError: There are none; or a prompt's text would be read as other tokens.
        """
        usable = self._usable(samples)
        makers = {"sft": self._to_imitate, "dpo": self._pairs, "kto": self._judged}
        rows = list(makers[self._kind](usable))
        if not rows:
            raise DataError(f"no sample gives a row for --as {self._kind}: {self.told() or 'there are none'}")
        return rows

    def told(self) -> str:
        """Describe in words what was left out; empty if nothing was."""
        return ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())

    def _usable(self, samples: Iterable[Archived]) -> Iterator[Archived]:
        for sample in samples:
            if sample.score != sample.score:
                self.left_out["without a score"] += 1
            elif OBSERVED in sample.versions:
                self.left_out["conversations with an environment"] += 1
            elif sample.finish != "stop":
                self.left_out["cut at the most tokens"] += 1
            else:
                yield sample

    def _to_imitate(self, samples: Iterable[Archived]) -> Iterator[Row]:
        best: dict[tuple[int, ...], Archived] = {}
        for sample in samples:
            known = best.get(tuple(sample.prompt))
            # Of equal ones the later: it is of weights that have learned more.
            if known is None or (sample.score, sample.step) > (known.score, known.step):
                best[tuple(sample.prompt)] = sample
        for sample in best.values():
            if self._is_below(sample):
                self.left_out["prompts whose best is below --min-score"] += 1
            else:
                yield {"prompt": self._prompt(sample), "answer": self._text(sample), **_origin(sample)}

    def _pairs(self, samples: Iterable[Archived]) -> Iterator[Row]:
        groups: dict[tuple[int, int], tuple[Archived, Archived]] = {}
        for sample in samples:
            worst, best = groups.get((sample.step, sample.prompt_index), (sample, sample))
            worst = sample if sample.score < worst.score else worst
            best = sample if sample.score > best.score else best
            groups[sample.step, sample.prompt_index] = worst, best
        for worst, best in groups.values():
            chosen, rejected = self._text(best), self._text(worst)
            if best.score == worst.score or chosen == rejected:
                self.left_out["groups in which nothing is better than the rest"] += 1
            elif self._is_below(best):
                self.left_out["groups whose best is below --min-score"] += 1
            else:
                texts = {"prompt": self._prompt(best), "chosen": chosen, "rejected": rejected}
                yield {**texts, "margin": best.score - worst.score, **_origin(best)}

    def _judged(self, samples: Iterable[Archived]) -> Iterator[Row]:
        for sample in samples:
            texts = {"prompt": self._prompt(sample), "completion": self._text(sample)}
            yield {**texts, "wanted": not self._is_below(sample), **_origin(sample)}

    def _is_below(self, sample: Archived) -> bool:
        return self._min_score is not None and sample.score < self._min_score

    def _prompt(self, sample: Archived) -> str:
        """Return the prompt's text, and check that training reads it as the same tokens."""
        start = start_of(self._tokenizer)
        text = self._tokenizer.decode(sample.prompt)
        rest = sample.prompt[len(start) :] if sample.prompt[: len(start)] == start else sample.prompt
        for each in (text, marked_text(rest, self._tokenizer, self._names)):
            if start + self._tokenizer.encode(each) == sample.prompt:
                return each
        raise DataError(
            f"step {sample.step}, prompt {sample.prompt_index}: the prompt {text!r:.60} would be read as other "
            "tokens than were answered; take the tokens from --json"
        )

    def _text(self, sample: Archived) -> str:
        if sample.response and sample.response[-1] in self._tokenizer.stop_ids:
            return self._tokenizer.decode(sample.response[:-1])
        return text_before_stop(sample.response, self._stop, self._tokenizer)


def _origin(sample: Archived) -> Row:
    """Return the origin of a row, which training does not read."""
    return {"score": sample.score, "step": sample.step, "prompt_index": sample.prompt_index, "index": sample.index}


def as_lines(rows: Iterable[Row]) -> Iterator[bytes]:
    """Yield each row as a line of JSON."""
    return (json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in rows)

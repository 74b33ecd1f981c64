"""Rows for ``data.train`` from what a run has sampled: what to imitate, pairs, or what is wanted and what is not."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hybridflow.data.prompts import Ends, ended
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

    Of a run with an environment, ``sft`` gives whole conversations, which training reads as the tokens and the mask
    that they had. Those of which no text is read so are left out.

    Args:
        kind: ``sft``: of each prompt the response with the highest score; ``dpo``: of each group the responses with the
            highest and the lowest, where these differ; ``kto``: every response, which is wanted from ``min_score`` on.
        tokenizer: Tokenizer of the run.
        min_score: Lowest score of a solution, or of the better response of a pair; None: any. ``kto`` needs it.
        stop: ``rollout.stop`` of the run. Training on its conversations needs the same.
        has_environment: Whether the run has an environment.

    Attributes:
        left_out: Reason -> how many samples, or groups.

    Raises:
        ConfigError: ``kto`` without ``min_score``.
    """

    def __init__(
        self,
        kind: str,
        tokenizer: Tokenizer,
        min_score: float | None = None,
        stop: Sequence[str] = (),
        *,
        has_environment: bool = False,
    ) -> None:
        if kind == "kto" and min_score is None:
            raise ConfigError("--as kto: which responses are wanted? give the lowest score of one with --min-score")
        self.left_out: Counter[str] = Counter()
        self._kind, self._tokenizer, self._min_score, self._stop = kind, tokenizer, min_score, stop
        self._names = special_names(tokenizer)
        self._tells_talks = has_environment and kind == "sft"

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
            elif OBSERVED in sample.versions and not self._tells_talks:
                self.left_out["conversations with an environment, which only --as sft gives"] += 1
            elif sample.finish != "stop":
                self.left_out["cut at the most tokens"] += 1
            else:
                yield sample

    def _to_imitate(self, samples: Iterable[Archived]) -> Iterator[Row]:
        best: dict[tuple[int, ...], tuple[Archived, Row]] = {}
        for sample in samples:
            known = best.get(tuple(sample.prompt))
            # Of equal ones the later: it is of weights that have learned more.
            if known is None or (sample.score, sample.step) > (known[0].score, known[0].step):
                texts = self._talk(sample) if self._tells_talks else {}
                if texts is None:
                    self.left_out["conversations whose texts would be read as other tokens"] += 1
                else:
                    best[tuple(sample.prompt)] = sample, texts
        for sample, texts in best.values():
            if self._is_below(sample):
                self.left_out["prompts whose best is below --min-score"] += 1
            else:
                texts = texts or {"prompt": self._prompt(sample), "answer": self._text(sample)}
                yield {**texts, **_origin(sample)}

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
        text = self._prompt_text(sample.prompt)
        if text is None:
            raise DataError(
                f"step {sample.step}, prompt {sample.prompt_index}: the prompt "
                f"{self._tokenizer.decode(sample.prompt)!r:.60} would be read as other tokens than were answered; take "
                "the tokens from --json"
            )
        return text

    def _prompt_text(self, tokens: list[int]) -> str | None:
        start = start_of(self._tokenizer)
        rest = tokens[len(start) :] if tokens[: len(start)] == start else tokens
        return self._text_of(rest, lambda text: self._tokenizer.encode(text) if start + rest == tokens else [])

    def _talk(self, sample: Archived) -> Row | None:
        """Return a conversation's prompt, and the texts that are written and observed behind it in turn.

        None: training would read them as other tokens.
        """
        told = zip((version == OBSERVED for version in sample.versions), sample.response, strict=True)
        runs = [(flag, [token for _, token in run]) for flag, run in itertools.groupby(told, lambda each: each[0])]
        # What was observed before the first response is learned as little as the prompt.
        first = runs.pop(0)[1] if runs and runs[0][0] else []
        parts: list[list[int]] = []
        for is_observed, run in runs:
            turns = [run] if is_observed else self._turns(run)
            parts += itertools.chain(*([each, []] for each in turns[:-1]), turns[-1:])
        texts = [
            self._text_of(part, self._tokenizer.encode if number % 2 else self._written)
            for number, part in enumerate(parts)
        ]
        prompt = self._prompt_text([*sample.prompt, *first])
        return None if prompt is None or None in texts else {"prompt": prompt, "solution": texts}

    def _turns(self, run: list[int]) -> list[list[int]]:
        """Return the turns between which nothing was observed."""
        ends = [index + 1 for index, token in enumerate(run[:-1]) if token in self._tokenizer.stop_ids]
        return [run[begin:end] for begin, end in zip([0, *ends], [*ends, len(run)], strict=True)]

    def _written(self, text: str) -> list[int]:
        return ended(self._tokenizer.encode(text), self._tokenizer, Ends(stop=tuple(self._stop)))

    def _text_of(self, tokens: list[int], read: Callable[[str], list[int]]) -> str | None:
        """Return the text that is read as these tokens; None: there is none."""
        bare = tokens[:-1] if tokens[-1:] == [self._tokenizer.eos_id] else tokens
        decoded = self._tokenizer.decode(bare)
        marked = (marked_text(each, self._tokenizer, self._names) for each in (bare, tokens))
        return next((text for text in (decoded, *marked) if read(text) == tokens), None)

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

"""Samples of an archive with few enough tokens for a page: which steps, groups, responses and tokens. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hybridflow.data.tokenizer import Tokenizer
from hybridflow.report.curves import short
from hybridflow.rollout.archive import Archived, SegmentName, list_segments, read_places, read_rows
from hybridflow.rollout.learned import Learned, LearnedIndex
from hybridflow.rollout.request import OBSERVED
from hybridflow.rollout.texts import Texts

_NUM_SAMPLES, _LEAST_SAMPLES, _NUM_RESPONSES = 24, 6, 8
"""Most samples of a step, how many it has whatever their length, and most of a group."""

_TOKEN_BYTES = 20
"""A token takes about so much on the page."""

_NUM_RANKS = 16
"""Most ranks whose samples of a step are looked at."""

_NUM_KEPT = 256
"""Most segments of which it is kept which samples they have."""

_HEAD_TOKENS, _TAIL_TOKENS = 400, 200
"""Most tokens at the beginning and at the end of a prompt or response."""


class _Place(NamedTuple):
    """Where a sample lies in the archive."""

    segment: SegmentName
    row: int
    prompt_index: int
    index: int  # type: ignore[assignment]  # it hides tuple.index
    score: float
    length: int


class Archive:
    """The archive of a run, of which a step's samples are read when they are asked for.

    Args:
        run_dir: Directory of the run.
        tokenizer: Tokenizer of the run; None: tokens are shown as numbers.
        step_bytes: What a step with long responses may take on the page.
    """

    def __init__(self, run_dir: Path, tokenizer: Tokenizer | None, step_bytes: int) -> None:
        self._step_bytes = step_bytes
        self._folder = run_dir / "rollouts"
        self._segments = list_segments(self._folder)
        self._tokens = _TokenTexts(tokenizer)
        self._places: dict[SegmentName, Mapping[str, Any]] = {}

    def steps(self) -> list[int]:
        """Return the steps with samples, in order. Of very many files, those of one rank tell.

        Raises:
            CheckpointError: The archive is damaged.
        """
        names = self._segments
        if len(names) > _NUM_KEPT:
            names = list({(name.first, name.last): name for name in reversed(names)}.values())
        return sorted({int(step) for name in names for step in np.unique(self._places_of(name)["step"])})

    def groups(self, step: int, index: LearnedIndex) -> dict[str, Any] | None:
        """Return groups of a step as a JSON object; None: the archive has no sample of it.

        Args:
            step: The step.
            index: Where what was learned in this step lies.

        Raises:
            CheckpointError: The archive is damaged.
        """
        holding = [name for name in self._segments if name.holds(step)]
        # Each is a file to be opened.
        opened = holding[:: math.ceil(len(holding) / _NUM_RANKS)] if holding else []
        places = [place for name in opened for place in self._of_step(name, step)]
        groups: dict[int, list[_Place]] = {}
        for place in places:
            groups.setdefault(place.prompt_index, []).append(place)
        if not groups:
            return None
        length = _mean([min(place.length, _HEAD_TOKENS + _TAIL_TOKENS) for place in places])
        room = self._step_bytes // int(_TOKEN_BYTES * length + 100)
        number = max(_LEAST_SAMPLES, min(_NUM_SAMPLES, room))
        size = min(max(map(len, groups.values())), _NUM_RESPONSES, max(2, number // 2))
        chosen = _choose_groups(groups, max(2, number // size))
        kept = [place for index in chosen for place in _choose_responses(groups[index], size)]
        samples = self._read(kept)
        learned = index.find({(step, place.prompt_index, place.index) for place in kept})
        return {
            "num_groups": len(groups),
            "num_samples": len(places),
            "ranks": [len({name.rank for name in each}) for each in (opened, holding)],
            "groups": [
                {
                    "prompt_index": prompt_index,
                    "num_samples": len(groups[prompt_index]),
                    "mean": short(_mean([place.score for place in groups[prompt_index]])),
                    "prompt": self._tokens.texts(own[0].prompt),
                    "responses": [self._response(each, learned.get((step, prompt_index, each.index))) for each in own],
                }
                for prompt_index in chosen
                if (own := [each for each in samples if each.prompt_index == prompt_index])
            ],
        }

    def _of_step(self, name: SegmentName, step: int) -> Iterator[_Place]:
        places = self._places_of(name)
        for row in np.flatnonzero(places["step"] == step).tolist():
            prompt_index, index = int(places["prompt_index"][row]), int(places["index"][row])
            score, length = float(places["score"][row]), int(places["response_length"][row])
            yield _Place(name, row, prompt_index, index, score, length)

    def _places_of(self, name: SegmentName) -> Mapping[str, Any]:
        if name not in self._places:
            if len(self._places) >= _NUM_KEPT:
                self._places.clear()
            self._places[name] = read_places(self._folder, name)
        return self._places[name]

    def _read(self, kept: Sequence[_Place]) -> list[Archived]:
        found: list[Archived] = []
        for name in dict.fromkeys(place.segment for place in kept):
            rows = [place.row for place in kept if place.segment == name]
            found += read_rows(self._folder, name, self._places_of(name), rows)
        return sorted(found, key=lambda each: (each.prompt_index, each.index))

    def _response(self, sample: Archived, learned: Learned | None) -> dict[str, Any]:
        """Return a response as a JSON object; a number that all tokens share is there once."""
        told: dict[str, Any] = {
            "index": sample.index,
            "score": short(sample.score),
            "finish": sample.finish,
            "num_tokens": len(sample.response),
            "tokens": self._tokens.texts(sample.response),
            "log_probs": _column(sample.log_probs),
            "ages": _column([math.nan if each == OBSERVED else sample.step - 1 - each for each in sample.versions]),
        }
        if learned is not None and len(learned.advantages) == len(sample.response):
            told["advantages"] = _column(learned.advantages.tolist())
            apart = np.abs(learned.old_log_probs - np.asarray(sample.log_probs, np.float32))
            apart[np.asarray(sample.versions) == OBSERVED] = math.nan
            if np.isfinite(apart).any():
                told["apart"] = _column(apart.tolist())
        return told


def has_archive(run_dir: Path) -> bool:
    """Return whether a run has an archive."""
    return bool(list_segments(run_dir / "rollouts"))


def size_of(value: Any) -> int:
    """Return how many bytes an object takes on the page."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace"))


class _TokenTexts:
    """The text of each token where it stands."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._texts = None if tokenizer is None else Texts(tokenizer)
        self._pieces = {} if tokenizer is None else tokenizer.pieces()
        self._known: dict[tuple[int, ...], str] = {}

    def texts(self, tokens: Sequence[int]) -> list[Any]:
        """Return the text of each token, cut in the middle where there are many.

        A token that is no text, such as an end of sequence, is a list with its name. What was cut is a number: so many
        tokens.
        """
        if len(tokens) <= _HEAD_TOKENS + _TAIL_TOKENS:
            return self._of(tokens)
        left_out = len(tokens) - _HEAD_TOKENS - _TAIL_TOKENS
        return [*self._of(tokens[:_HEAD_TOKENS]), left_out, *self._of(tokens[-_TAIL_TOKENS:])]

    def _of(self, tokens: Sequence[int]) -> list[Any]:
        if self._texts is None:
            return [f"{token} " for token in tokens]
        found: list[Any] = []
        behind: tuple[int, ...] = ()
        before = ""
        for token in tokens:
            # The token before is decoded again, since the first one of a text may lose its leading space.
            text = self._decode(self._texts, (*behind, token))
            is_open = text.endswith("\ufffd")
            is_text = is_open or len(text) > len(before)
            found.append("" if is_open else text[len(before) :] if is_text else [self._pieces.get(token, str(token))])
            alone = self._texts.alone(token)
            if alone is not None:
                behind, before = (token,), alone
            elif is_text:
                behind, before = (*behind, token), before if is_open else text
        return found

    def _decode(self, texts: Texts, tokens: tuple[int, ...]) -> str:
        if tokens not in self._known:
            self._known[tokens] = texts.decode(tokens)
        return self._known[tokens]


def _choose_groups(groups: Mapping[int, Sequence[_Place]], number: int) -> list[int]:
    """Return groups in the data order: the best and the worst, those whose scores differ most, and others."""
    if len(groups) <= number:
        return sorted(groups)
    means = {index: _mean([place.score for place in own]) for index, own in groups.items()}
    scored = [index for index in sorted(groups) if not math.isnan(means[index])]
    chosen: list[int] = []
    if scored:
        chosen += [max(scored, key=means.__getitem__), min(scored, key=means.__getitem__)]
        by_spread = sorted(scored, key=lambda index: -_spread(groups[index]))
        chosen += [index for index in by_spread if _spread(groups[index]) > 0][: max(0, number // 2 - 1)]
    others = [index for index in sorted(groups) if index not in chosen]
    chosen = list(dict.fromkeys(chosen))[:number]
    wanted = number - len(chosen)
    chosen += [others[place * len(others) // wanted] for place in range(wanted)]
    return sorted(chosen)


def _choose_responses(group: Sequence[_Place], number: int) -> list[_Place]:
    """Return responses of a group in order: the best and the worst."""
    if len(group) <= number:
        return list(group)
    by_score = sorted(group, key=lambda place: -math.inf if math.isnan(place.score) else place.score)
    num_best = (number + 1) // 2
    return sorted((*by_score[: number - num_best], *by_score[-num_best:]), key=lambda place: place.index)


def _spread(group: Sequence[_Place]) -> float:
    scores = [place.score for place in group if not math.isnan(place.score)]
    return max(scores) - min(scores) if scores else 0.0


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _column(values: Sequence[float]) -> Any:
    """Return numbers with few digits, cut as the tokens are; one number where all are the same."""
    if len(values) > _HEAD_TOKENS + _TAIL_TOKENS:
        values = [*values[:_HEAD_TOKENS], math.nan, *values[-_TAIL_TOKENS:]]
    told = [short(value, digits=3) for value in values]
    return told[0] if told and set(told) <= {told[0], None} else told

"""The work of ``hybridflow generate`` on each rank: prompts to samples, in as many starts as it takes."""

from __future__ import annotations

import argparse
import math
import secrets
import sys
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from datetime import timedelta

import torch

from hybridflow.data.chat import chat_template
from hybridflow.data.images import IMAGES, Image
from hybridflow.data.tokenizer import Tokenizer, has_marks, special_names
from hybridflow.errors import DataError
from hybridflow.exit_status import DONE, FAILURE, REQUEUE
from hybridflow.families.cut import check_cut
from hybridflow.families.images import ImageSettings, reads_images
from hybridflow.families.model import ModelConfig
from hybridflow.observe.activity import current_activity
from hybridflow.observe.console import complain, print_out
from hybridflow.observe.rank_log import tell
from hybridflow.parallel.world import World
from hybridflow.rollout.request import LOOK_STEPS, Request, Response, SamplingParams
from hybridflow.rollout.texts import text_before_stop, with_stop_tokens
from hybridflow.serving.files import identity, sampling_of
from hybridflow.serving.options import Options
from hybridflow.serving.placed import (
    Placed,
    as_tensor,
    find_tokenizer,
    finite_or_none,
    layout_of,
    memory_line,
    model_folder,
    model_settings,
    place_model,
    settings_of_images,
)
from hybridflow.serving.prompts import Encoded, Prompt, deal, encode_prompt, read_prompts
from hybridflow.serving.results import Key, ResultLog, Results, Row
from hybridflow.trainer.stopping import Stopping

_TELL_S = 10.0
"""So often a line says how far it is."""

_LEAVE_S = 2.0
"""Seconds that stopping takes beside ending the process: samples are on disk as they come."""

_LOOK_S = 0.2
_PIECES = 4
"""At least so many pieces of work for each replica, as long as there are so many samples."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A prompt that can be answered.

    Attributes:
        prompt: The line.
        ids: Its tokens, ``[prompt]`` int64: a file may have hundreds of thousands of prompts, and all ranks keep them.
        images: Those in the prompt.
        params: How to sample.
        count: Samples wanted.
    """

    prompt: Prompt
    ids: torch.Tensor
    images: tuple[Image, ...]
    params: SamplingParams
    count: int


def dry_run(arguments: argparse.Namespace) -> int:
    """Check model, layout, prompts and the parts of earlier starts, and print what would be done."""
    model, layout = model_settings(arguments), layout_of(arguments, arguments.ranks)
    check_cut(model, layout, f"--layout {layout}")
    prompts, sha256 = read_prompts(arguments.prompts, arguments.prompt_field)
    run = identity(arguments, sha256, model.dtype, model.max_context)
    Results(arguments.out).check(run, is_forced=arguments.force)
    settings = _settings(arguments, model)
    tasks, bad = _tasks(prompts, find_tokenizer(arguments), arguments, model, settings)
    bad |= _unreadable(tasks)
    if arguments.strict and bad:
        raise _strict(prompts, bad)
    longest = max((len(task.ids) for task in tasks), default=0)
    lengths = sorted(len(task.ids) + task.params.max_new_tokens for task in tasks for _ in range(task.count))
    print(
        f"{len(prompts)} prompts, {len(bad)} of them bad; {sum(task.count for task in tasks)} samples\n"
        f"prompts of {sum(len(task.ids) for task in tasks)} tokens in all, the longest of {longest}; context "
        f"{model.max_context}\n"
        f"layout {layout} on {layout.world_size} ranks, {model.dtype}\n"
        f"{memory_line(model, layout, lengths[-arguments.max_concurrent :], arguments.cache_memory, settings)}"
    )
    for prompt_index, reason in list(bad.items())[:5]:
        print_out(f"{prompts[prompt_index].place}: {reason}")
    return FAILURE if bad else DONE


def generate(arguments: argparse.Namespace, world: World) -> int:
    """Generate what is not there yet; the output when all is. Returns the exit status, the same on all ranks.

    Collective: all ranks.

    Raises:
        HybridflowError: Something that was asked for cannot be, or a file cannot be written.
    """
    began_s = time.monotonic()
    with current_activity("reading the prompts"):
        prompts, sha256 = read_prompts(arguments.prompts, arguments.prompt_field)
    with current_activity("reading the model"):
        settings = _settings(arguments, model_settings(arguments))
        placed = place_model(arguments, world, settings)
    with current_activity("preparing"):
        tasks, bad = _tasks(prompts, placed.tokenizer, arguments, placed.model, settings)
        placed.images.update((task.prompt.prompt_index, task.images) for task in tasks if task.images)
        if arguments.strict and bad:
            raise _strict(prompts, bad)
        results = Results(arguments.out)
        if world.rank == 0:
            run = identity(arguments, sha256, placed.model.dtype, placed.model.max_context)
            results.prepare(run, is_forced=arguments.force)
            if _are_plain(tasks, placed.tokenizer):
                print_out(
                    'hybridflow: prompts are plain text; for a chat model a line is {"messages": [{"role": "user", '
                    '"content": TEXT}]}'
                )
            if settings is None and _have_images(tasks) and reads_images(str(model_folder(arguments))):
                print_out(
                    f"hybridflow: prompts are text alone; --images-field {IMAGES} gives the model the images of its "
                    "rows, too"
                )
    # One looks: the others might already see what the first of them writes, and deal the rest in another way.
    found = placed.everyone.decide("the results of earlier starts", sorted(results.find()) if world.rank == 0 else None)
    there = {(prompt_index, index) for prompt_index, index in found}
    start = placed.everyone.decide("the name of this start", f"{time.time_ns():020d}-{secrets.token_hex(4)}")
    log = ResultLog(results, start, world.rank) if placed.is_reporter or world.rank == 0 else None
    if world.rank == 0 and log is not None:
        log.add(
            _refusal(prompt_index, reason) for prompt_index, reason in bad.items() if (prompt_index, 0) not in there
        )
    requests = _requests(tasks, there, placed)
    num_wanted = sum(task.count for task in tasks)
    counts = _Counts(world, num_wanted - sum(key[0] not in bad for key in there), num_wanted)
    with current_activity("generating"):
        _run(requests, placed, Stopping(world), counts, log, arguments)
    with current_activity("waiting for the other replicas"):
        counts.wait_for_all(world.size)
    if log is not None:
        log.close()
    placed.everyone.barrier("the end of generating")
    status = _finish(results, prompts, num_wanted + len(bad), began_s, counts, placed) if world.rank == 0 else DONE
    return int(placed.everyone.decide("the end", status))


@torch.inference_mode()
def _run(
    requests: list[Request],
    placed: Placed,
    stopping: Stopping,
    counts: _Counts,
    log: ResultLog | None,
    arguments: argparse.Namespace,
) -> None:
    """Generate until all are done or the job is to stop. Collective: tp, pp."""
    # A time limit is to leave room for what stopping takes, which is next to nothing.
    stopping.learn({"checkpoint/write_s": _LEAVE_S})
    session = placed.engine.open(requests)
    session.add(requests)
    while not session.is_idle:
        if session.looks_up() and stopping.agree(placed.replica):
            session.pause()
            placed.engine.finish()
            if placed.everyone.is_lead:
                tell(f"hybridflow: stops, what is finished is kept: {stopping.reason}")
            return
        ended = session.step(LOOK_STEPS)
        if ended and placed.is_reporter:
            assert log is not None, "who reports has a log"
            log.add(_row(request, response, placed.tokenizer, arguments) for request, response in ended)
            counts.add(len(ended), sum(len(response.tokens) for _, response in ended))
        counts.tell()
    placed.engine.finish()


def _tasks(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    arguments: argparse.Namespace,
    model: ModelConfig,
    settings: ImageSettings | None,
) -> tuple[list[Task], dict[int, str]]:
    """Return the prompts that can be answered, and by number why the others cannot.

    The cache may still have no room for some.
    """
    tasks, bad = [], {}
    options, kwargs, field = sampling_of(arguments), arguments.chat_template_kwargs, arguments.images_field
    vocab_size, max_context = model.known_vocab_size, model.max_context
    for prompt in prompts:
        if prompt.error is not None:
            bad[prompt.prompt_index] = prompt.error
            continue
        try:
            encoded = encode_prompt(prompt, tokenizer, vocab_size, max_context, kwargs, field, settings)
            tasks.append(_task(prompt, encoded, tokenizer, options, max_context))
        except DataError as error:
            bad[prompt.prompt_index] = str(error)
    return tasks, bad


def _settings(arguments: argparse.Namespace, model: ModelConfig) -> ImageSettings | None:
    """Return how images become tokens; None: prompts are text."""
    return None if arguments.images_field is None else settings_of_images(arguments, model)


def _unreadable(tasks: Sequence[Task]) -> dict[int, str]:
    """Return by number why the model could not see the images of a prompt: here alone all pixels are read ahead."""
    bad = {}
    for task in tasks:
        try:
            for image in task.images:
                image.open()
        except DataError as error:
            bad[task.prompt.prompt_index] = str(error)
    return bad


def _have_images(tasks: Sequence[Task]) -> bool:
    return any(task.prompt.fields.get(IMAGES) for task in tasks)


def _are_plain(tasks: Sequence[Task], tokenizer: Tokenizer | None) -> bool:
    """Return whether a prompt is text that goes past the tokenizer's chat template, which is seldom meant."""
    if tokenizer is None or chat_template(tokenizer) is None:
        return False
    names = special_names(tokenizer)
    texts = (task.prompt.fields.get("prompt") for task in tasks)
    return any(isinstance(text, str) and not has_marks(text, names) for text in texts)


def _task(prompt: Prompt, encoded: Encoded, tokenizer: Tokenizer | None, options: Options, max_context: int) -> Task:
    ids = encoded.ids
    if len(ids) >= max_context:
        raise DataError(f"the prompt has {len(ids)} tokens, the context {max_context}; shorten the prompt")
    merged = {"stop_ids": () if tokenizer is None else tokenizer.stop_ids, **options, **prompt.options}
    if tokenizer is None and (merged.get("stop") or merged.get("bad")):
        raise DataError("stop and bad are texts, and the model's directory has no tokenizer; give --tokenizer")
    count = merged.pop("n", 1)
    # What the context leaves is what there can be.
    merged["max_new_tokens"] = min(merged["max_new_tokens"], max_context - len(ids))
    merged["min_new_tokens"] = min(merged.get("min_new_tokens", 0), merged["max_new_tokens"])
    return Task(
        prompt=prompt,
        ids=as_tensor(ids),
        images=encoded.images,
        params=with_stop_tokens(SamplingParams(**merged), tokenizer),
        count=count,
    )


def _requests(tasks: Sequence[Task], there: Set[Key], placed: Placed) -> list[Request]:
    """Return the requests of this rank's replica, without those that are answered already."""
    missing = [
        (task, index) for task in tasks for index in range(task.count) if (task.prompt.prompt_index, index) not in there
    ]
    replicas = placed.mesh.layout.dp
    # Samples of a prompt share its computation, so they stay together, but not where replicas would have nothing.
    most = max(1, math.ceil(len(missing) / (_PIECES * replicas)))
    pieces: list[list[tuple[Task, int]]] = []
    for task, index in missing:
        if not pieces or pieces[-1][0][0] is not task or len(pieces[-1]) == most:
            pieces.append([])
        pieces[-1].append((task, index))
    lengths = (sum(len(task.ids) + task.params.max_new_tokens for task, _ in piece) for piece in pieces)
    return [
        Request(
            prompt=task.ids,
            params=task.params,
            prompt_index=task.prompt.prompt_index,
            index=index,
        )
        for place in deal(lengths, replicas)[placed.dp]
        for task, index in pieces[place]
    ]


def _row(request: Request, response: Response, tokenizer: Tokenizer | None, arguments: argparse.Namespace) -> Row:
    tokens = response.tokens.tolist()
    row: Row = {"prompt_index": request.prompt_index, "index": request.index}
    if tokenizer is not None:
        row["text"] = text_before_stop(tokens, request.params.stop, tokenizer)
    row["token_ids"] = tokens
    if arguments.log_probs:
        row["log_probs"] = finite_or_none(response.log_probs)
    if arguments.prompt_log_probs and response.prompt_log_probs is not None:
        row["prompt_log_probs"] = finite_or_none(response.prompt_log_probs)
    row["finish"] = response.finish
    if response.error is not None:
        row["error"] = response.error
    return row


def _refusal(prompt_index: int, reason: str) -> Row:
    return {"prompt_index": prompt_index, "index": 0, "text": "", "token_ids": [], "finish": "failed", "error": reason}


def _strict(prompts: Sequence[Prompt], bad: dict[int, str]) -> DataError:
    prompt_index, reason = next(iter(bad.items()))
    return DataError(f"{prompts[prompt_index].place}: {reason}; without --strict the other prompts are answered")


def _finish(
    results: Results, prompts: Sequence[Prompt], num_rows: int, began_s: float, counts: _Counts, placed: Placed
) -> int:
    """Write the output if all is there, and say what was done; the exit status."""
    found = results.find()
    if len(found) < num_rows:
        print(f"hybridflow: {len(found)} of {num_rows} samples are kept in {results.folder}; run the same again")
        sys.stdout.flush()
        return REQUEUE
    failed = [row for row in results.read(found) if row["finish"] == "failed"]
    results.finish({prompt.prompt_index: prompt for prompt in prompts}, found)
    seconds, (num_samples, num_tokens) = time.monotonic() - began_s, counts.totals()
    rate = num_tokens / max(counts.seconds, 1e-9)
    print(
        f"hybridflow: {results.out}: {num_rows} samples of {len(prompts)} prompts, {len(failed)} failed; now "
        f"{num_samples} samples, {num_tokens} tokens, {rate:.0f} tokens/s, {seconds:.1f} s in all; "
        f"{placed.mesh.layout}, {placed.model.dtype}",
        flush=True,
    )
    if not failed:
        return DONE
    first = failed[0]
    others = f" (the first of {len(failed)} that failed)" if len(failed) > 1 else ""
    complain(f"{prompts[first['prompt_index']].place}: {first['error']}{others}")
    return FAILURE


class _Counts:
    """How far all replicas are, by way of where the ranks met: none waits for another."""

    def __init__(self, world: World, num_left: int, num_wanted: int) -> None:
        self._store = world.new_store("generate")
        self._num_left, self._num_wanted = num_left, num_wanted
        self._is_teller = world.rank == 0
        self._began_s = self._told_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds since generating began."""
        return time.monotonic() - self._began_s

    def add(self, num_samples: int, num_tokens: int) -> None:
        """Add samples and tokens that this replica has finished."""
        self._store.add("samples", num_samples)
        self._store.add("tokens", num_tokens)

    def totals(self) -> tuple[int, int]:
        """Return samples and tokens of all replicas in this start."""
        return self._store.add("samples", 0), self._store.add("tokens", 0)

    def tell(self) -> None:
        """Report the progress of all replicas now and then, on rank 0."""
        if not self._is_teller or time.monotonic() - self._told_s < _TELL_S:
            return
        self._told_s = time.monotonic()
        num_samples, num_tokens = self.totals()
        left = "?"
        if num_samples:
            left = str(timedelta(seconds=round((self._num_left - num_samples) / num_samples * self.seconds)))
        done = self._num_wanted - self._num_left + num_samples
        tell(f"hybridflow: {done} of {self._num_wanted} samples, {num_tokens / self.seconds:.0f} tokens/s, {left} left")

    def wait_for_all(self, num_ranks: int) -> None:
        """Return when all have come. Replicas may differ by hours, so no deadline: the watch sees deaths."""
        self._store.add("ended", 1)
        while self._store.add("ended", 0) < num_ranks:
            time.sleep(_LOOK_S)
            self.tell()

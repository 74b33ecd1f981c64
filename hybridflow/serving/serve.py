"""The work of ``hybridflow serve`` on each rank: rank 0 listens, and tells the others what is new at each step."""

from __future__ import annotations

import argparse
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hybridflow.data.images import Image
from hybridflow.errors import ConfigError
from hybridflow.exit_status import DONE
from hybridflow.families.hub_cache import model_name
from hybridflow.families.images import ImageSettings, reads_images
from hybridflow.models.hf_model import check_image_reading
from hybridflow.observe.activity import current_activity
from hybridflow.observe.rank_log import say, tell
from hybridflow.parallel.world import World
from hybridflow.rollout.request import Request, Response, SamplingParams, expand
from hybridflow.rollout.sampling import BAD_TEXT, FAILURES, NOTHING_LEFT
from hybridflow.serving.api import Sample, Served
from hybridflow.serving.desk import Desk
from hybridflow.serving.endpoint import Endpoint, token_of
from hybridflow.serving.images import Looker
from hybridflow.serving.options import as_tuples
from hybridflow.serving.placed import (
    Placed,
    as_tensor,
    check_lockstep,
    finite_or_none,
    layout_of,
    model_folder,
    model_settings,
    place_model,
    settings_of_images,
)
from hybridflow.serving.scores import Scored

_IDLE_S = 0.5
"""So often all ranks meet while there is nothing to do."""

_LAST_ANSWERS_S = 5.0


@torch.inference_mode()
def serve(arguments: argparse.Namespace, world: World) -> int:
    """Serve until asked to end. Collective: all ranks.

    Raises:
        HybridflowError: The model cannot be served as was asked, or the address not be listened on.
    """
    check_lockstep(layout_of(arguments, world.size))
    with current_activity("reading the model"):
        settings = _settings(arguments, is_teller=world.rank == 0)
        placed = place_model(arguments, world, settings)
    replica = _Replica(placed)
    most_tokens = min(placed.everyone.gather(placed.engine.most_tokens, "the room of the caches"))
    front = _Front(arguments, placed, world, most_tokens, settings) if world.rank == 0 else None
    news: dict[str, Any] = {}
    with current_activity("serving"):
        while True:
            if front is not None:
                news["commands"], news["is_over"] = front.take(), front.is_over()
            told = placed.everyone.gather(news, "a step of serving")
            if front is not None:
                front.deliver(told)
            if told[0]["is_over"]:
                break
            commands, images = told[0]["commands"], list[Any]()
            if any(command.get("image_row") is not None for command in commands):
                # From one to all: what all tell all is there once for each rank, and images are large.
                images = placed.everyone.decide("images of requests", None if front is None else front.images)
            news = {"results": replica.step(commands, images)}
    if front is not None:
        front.close()
    return DONE


def _settings(arguments: argparse.Namespace, *, is_teller: bool) -> ImageSettings | None:
    """Return how images become tokens; None: the model, or what is installed, reads none.

    Raises:
        ConfigError: It reads none, and ``--image-max-pixels`` is given.
    """
    is_asked = arguments.image_max_pixels is not None
    if not is_asked and not reads_images(str(model_folder(arguments))):
        return None
    try:
        settings = settings_of_images(arguments, model_settings(arguments))
        check_image_reading(Path(settings.path))
    except ConfigError as error:
        if is_asked:
            raise
        if is_teller:
            tell(f"hybridflow: messages are text alone: {error}")
        return None
    return settings


class _Replica:
    """This rank's part in generating.

    Args:
        placed: The model.
    """

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self._session = placed.engine.open()
        self._ids: dict[int, int] = {}
        self._running: dict[int, Request] = {}
        # Of streamed requests: id of the request -> tokens that were sent.
        self._num_sent: dict[int, int] = {}
        # Of requests with images: id of the request -> number of these images.
        self._image_rows: dict[int, int] = {}

    def step(self, commands: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
        """Take up what is new and go on by a step; what came of it, on the rank that reports. Collective: tp, pp.

        Args:
            commands: From ``Desk.take``.
            images: Pairs of an ``image_row`` in them and the images of that row.
        """
        rows = {row: tuple(Image(source, tuple(grid), token_id) for source, grid, token_id in of) for row, of in images}
        for command in commands:
            if command["do"] == "cancel":
                self._cancel(command["ids"])
            elif command["replica"] == self._placed.dp:
                self._add(command, rows.get(command["image_row"]))
        if self._session.is_idle:
            return []
        ended = self._session.step()
        results = [self._ended(request, response) for request, response in ended]
        if not self._placed.is_reporter:
            return []
        return [*results, *self._pieces()]

    def _add(self, command: dict[str, Any], images: tuple[Image, ...] | None) -> None:
        params = SamplingParams(**{name: as_tuples(value) for name, value in command["params"].items()})
        request = Request(prompt=as_tensor(command["prompt"]), params=params, prompt_index=command["prompt_index"])
        requests = expand(request, len(command["ids"]))
        if images is not None:
            self._placed.images[command["image_row"]] = images
            self._image_rows |= {id(each): command["image_row"] for each in requests}
        for sample_id, request in zip(command["ids"], requests, strict=True):
            self._ids[id(request)], self._running[sample_id] = sample_id, request
            if command["is_streamed"]:
                self._num_sent[id(request)] = 0
        self._session.add(requests)

    def _cancel(self, ids: list[int]) -> None:
        requests = [self._running[each] for each in ids if each in self._running]
        self._session.cancel(requests)
        for request in requests:
            self._forget(request)

    def _ended(self, request: Request, response: Response) -> dict[str, Any]:
        prompt = response.prompt_log_probs
        sample = Sample(
            tokens=response.tokens.tolist(),
            log_probs=finite_or_none(response.log_probs),
            prompt_log_probs=None if prompt is None else finite_or_none(prompt),
            finish=response.finish,
            error=response.error,
            top_log_probs=response.top_log_probs,
            prompt_top_log_probs=response.prompt_top_log_probs,
            is_refused=response.finish == "failed" and self._is_refused(request, response),
        )
        return {"id": self._forget(request), "sample": asdict(sample)}

    def _is_refused(self, request: Request, response: Response) -> bool:
        """Return whether a sample failed by what was asked for."""
        if self._placed.engine.refusal(request) is not None:
            return True
        return (response.error or "").endswith((FAILURES[NOTHING_LEFT], FAILURES[BAD_TEXT]))

    def _pieces(self) -> list[dict[str, Any]]:
        """Return the new output of streamed samples that have some."""
        found = []
        for request, tokens, log_probs, tops in self._session.new_tokens(self._num_sent) if self._num_sent else ():
            self._num_sent[id(request)] += len(tokens)
            new = Scored(tokens, finite_or_none(log_probs), tops if request.params.num_top_log_probs else None)
            found.append({"id": self._ids[id(request)], "new": new})
        return found

    def _forget(self, request: Request) -> int:
        sample_id = self._ids.pop(id(request))
        del self._running[sample_id]
        self._num_sent.pop(id(request), None)
        row = self._image_rows.pop(id(request), None)
        if row is not None and row not in self._image_rows.values():
            del self._placed.images[row]
        return sample_id


class _Front:
    """Rank 0's part with clients.

    Attributes:
        images: Of the messages that were taken last: number of the row, and its images.

    Args:
        arguments: Of the command.
        placed: The model.
        world: All ranks.
        most_tokens: Longest sequence for which all replicas have room.
        settings: How images become tokens; None: messages are text.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        placed: Placed,
        world: World,
        most_tokens: int,
        settings: ImageSettings | None,
    ) -> None:
        self._watch, self._grace_s = world.watch, arguments.grace_s
        self._desk = Desk(placed.mesh.layout.dp, arguments.max_waiting)
        self._end_s: float | None = None
        self.images: list[tuple[Any, Any]] = []
        served = Served(
            name=model_name(Path(arguments.model)) if arguments.name is None else arguments.name,
            tokenizer=placed.tokenizer,
            vocab_size=placed.vocab_size,
            max_context=most_tokens,
            chat_template_kwargs=arguments.chat_template_kwargs,
            looker=None if settings is None else Looker(settings),
        )
        self._endpoint = Endpoint(
            arguments.host,
            arguments.port,
            served=served,
            desk=self._desk,
            token=token_of(arguments),
            request_s=arguments.request_s,
        )
        signal.signal(signal.SIGINT, self._interrupt)
        self._endpoint.start()
        if most_tokens < placed.model.max_context:
            tell(
                f"hybridflow: the key-value cache has room for {most_tokens} tokens of a sequence, so the context is "
                f"no longer than that, instead of {placed.model.max_context}; raise --cache-memory"
            )
        say(f"hybridflow: serving {served.name} at {self._endpoint.url}")

    def take(self) -> list[dict[str, Any]]:
        """Return new messages, without their images; where nothing runs, within ``_IDLE_S``."""
        commands = self._desk.take(_IDLE_S)
        pairs = [(command.get("image_row"), command.pop("images", None)) for command in commands]
        self.images = [pair for pair in pairs if pair[0] is not None]
        return commands

    def is_over(self) -> bool:
        """Return whether to end now: asked to, and nothing runs or the grace is over."""
        if self._watch is None or self._watch.stop_reason is None:
            return False
        if self._end_s is None:
            self._desk.close()
            self._end_s = time.monotonic() + self._grace_s
            tell(f"hybridflow: ends, {self._desk.num_running} samples run: {self._watch.stop_reason}")
        return self._desk.num_running == 0 or time.monotonic() > self._end_s

    def deliver(self, told: list[dict[str, Any]]) -> None:
        """Hand out the outputs of all replicas."""
        for news in told:
            for result in news.get("results", ()):
                sample = Sample(**result["sample"]) if "sample" in result else None
                self._desk.deliver(result["id"], Scored(*result.get("new", ())), sample)

    def close(self) -> None:
        """Tell who still waits, and leave."""
        self._desk.give_up(_LAST_ANSWERS_S)
        self._endpoint.close()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # A second one ends the process at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self._watch is not None:
            self._watch.ask_stop("received SIGINT")

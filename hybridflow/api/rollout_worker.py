"""A model that only generates, on the ranks of a program: ours or vLLM's engine, with weights that can be replaced."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hybridflow.api.device_mesh import DeviceMesh, settings_of_mesh
from hybridflow.api.feed import check_same_rows
from hybridflow.api.flow import FlowNode, RoleFlow
from hybridflow.api.hybrid_actor import HybridActor
from hybridflow.api.parts import Part
from hybridflow.api.responses import requests_to, respond
from hybridflow.api.roles import Actor
from hybridflow.api.token_rows import token_rows
from hybridflow.api.worker_engines import HFWorker, HybridWorker, MegatronWorker, Options, UserWorker, VllmWorker
from hybridflow.api.world import find_world
from hybridflow.checkpoint.model_info import latest_actor
from hybridflow.data.chat import chat_template, read_messages, render_chat
from hybridflow.data.rows import are_messages
from hybridflow.data.tokenizer import Tokenizer, open_tokenizer, start_of, tokenizer_in
from hybridflow.errors import ConfigError, DataError, EngineError
from hybridflow.families.hub_cache import find_model
from hybridflow.layout import mesh as geometry
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.user_model import is_user_class
from hybridflow.parallel.megatron import rank_sets
from hybridflow.parallel.world import World
from hybridflow.rollout.request import Request, SamplingParams, length_refusal
from hybridflow.rollout.texts import with_stop_tokens

ENGINES = ("megatron", "vllm", "hf")


@dataclass(frozen=True, kw_only=True)
class Generated:
    """One response.

    Attributes:
        prompt: Its number among the prompts.
        text: Text of the response; None without a tokenizer.
        tokens: ``[response]`` int64, an end of sequence included.
        log_probs: ``[response]`` fp32 under ``softmax(logits / temperature)``.
        finish: ``stop``: at an end of sequence or a stop text; ``length``: at ``max_new_tokens``.
    """

    prompt: int
    text: str | None
    tokens: Tensor
    log_probs: Tensor
    finish: str


class RolloutWorker(FlowNode):
    """Generates with a model, cut over the ranks of a mesh. Collective: all ranks, with the same arguments.

    In a flow it is the policy: ``RolloutWorker(model) >> RewardModel(path) >> PPO()``.

    Args:
        model: A directory; a model of ``transformers``; a ``GPTModel`` of megatron-core; an actor class of one's own;
            a ``hybridflow.Actor``; or a ``HybridActor``, which generates where and with the weights that it has.
        device_mesh: Where; its layout is that of its groups, or ``tensor_parallel_size`` and
            ``pipeline_parallel_size``. None: all ranks.
        engine: ``megatron``: ours. ``vllm``: vLLM within this process, which has the whole model on each rank. ``hf``:
            forward passes of ``transformers``, also of models that ours does not know, whole on each rank, sampled with
            our noise.
        tokenizer: Path, or a fast tokenizer of ``transformers``; None: the one that lies beside the model. Without any
            prompts are token ids.
        tensor_parallel_size: Ranks that share each matrix.
        pipeline_parallel_size: Ranks that share the layers.
        max_context: Longest sequence; None: the model's own.
        dtype: ``fp32``, ``bf16`` or ``fp16``; None: the model's own.
        max_concurrent: Sequences decoded together.
        seed: Seed of the noise.

    Raises:
        ConfigError: The model is none of these, or is not computed here.
        LayoutError: The layout does not cut the model, or does not fill the ranks.
        EngineError: vLLM is not installed, or cannot run the model.
    """

    def __init__(
        self,
        model: Any,
        device_mesh: DeviceMesh | None = None,
        engine: Literal["megatron", "vllm", "hf"] = "megatron",
        *,
        tokenizer: Any = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        max_context: int | None = None,
        dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        max_concurrent: int = 256,
        seed: int = 0,
    ) -> None:
        if engine not in ENGINES:
            raise ConfigError(f"RolloutWorker: engine={engine!r}; expected {' or '.join(map(repr, ENGINES))}")
        sizes = {"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
        self._given = _kept(model), tokenizer, device_mesh, engine, sizes
        self._world = find_world()
        self._version = 0
        self._next_prompt_index = 0
        self._worker: MegatronWorker | VllmWorker | UserWorker | HFWorker | HybridWorker | None
        if isinstance(model, HybridActor):
            self._worker = HybridWorker(model)
            self._mesh = self._worker.mesh
            self.tokenizer = self._worker.tokenizer if tokenizer is None else _tokenizer(None, tokenizer)
            return
        self._mesh = _mesh(self._world, device_mesh, tensor_parallel_size, pipeline_parallel_size, engine)
        model, tokenizer = _of_part(model, tokenizer)
        self.tokenizer = _tokenizer(model, tokenizer)
        self._world.make_groups(rank_sets([self._mesh], self._world.size))
        options = Options(max_context, dtype, max_concurrent, seed, self.tokenizer)
        if is_user_class(model):
            if engine == "vllm":
                raise ConfigError("RolloutWorker: engine='vllm' does not run a class of your own; leave it out")
            self._worker = UserWorker(model, self._world, self._mesh, options)
        elif engine == "vllm":
            self._worker = VllmWorker(model, self._world, options)
        elif engine == "hf":
            self._worker = HFWorker(model, self._world, self._mesh, options)
        else:
            self._worker = MegatronWorker(model, self._world, self._mesh, options)

    def generate(
        self,
        prompts: Sequence[str]
        | Sequence[Sequence[int]]
        | Sequence[Sequence[Mapping[str, Any]]]
        | Tensor
        | Mapping[str, Any],
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        *,
        do_sample: bool = True,
        num_samples: int = 1,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> list[Generated]:
        """Return responses to prompts. Collective: all ranks, with the same arguments.

        Args:
            prompts: Texts, conversations as lists of messages, or token ids of each, at least one; or ``input_ids``
                with their ``attention_mask``, as a tokenizer of ``transformers`` gives them.
            max_new_tokens: Most tokens of a response.
            temperature: Divides the logits.
            do_sample: Whether to sample; else the likeliest token is taken.
            num_samples: Responses to each prompt.
            top_k: Sample among so many of the likeliest tokens; 0: all.
            top_p: Sample among the likeliest tokens that together reach this probability.
            stop: Texts that end a response, too, and names of special tokens.
            stop_ids: Tokens that end a response; None: the tokenizer's.
            seed: In the place of the worker's own: each call with it gives the same responses. None: each call gives
                others.

        Returns:
            The responses in the order of the prompts, ``num_samples`` of each, on all ranks.

        Raises:
            DataError: A prompt has no tokens or leaves no room for a response, or a setting is not allowed.
            EngineError: A response failed.
        """
        ends = () if self.tokenizer is None else self.tokenizer.stop_ids
        try:
            asked = SamplingParams(
                max_new_tokens=max_new_tokens,
                # The likeliest token is the same at any temperature.
                temperature=temperature if do_sample else 1.0,
                top_k=top_k,
                top_p=top_p,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                stop_ids=ends if stop_ids is None else tuple(stop_ids),
                greedy=not do_sample,
                seed=seed,
            )
        except DataError as error:
            raise DataError(str(error).replace("set greedy instead", "give do_sample=False instead")) from None
        params = with_stop_tokens(asked, self.tokenizer)
        encoded = self._encoded(prompts)
        first_prompt_index = self._next_prompt_index if seed is None else 0
        requests = requests_to(encoded, params, first_prompt_index=first_prompt_index, num_samples=num_samples)
        told = [(each.prompt.tolist(), each.params) for each in requests]
        check_same_rows(told, "prompts and settings", self._world.everyone())
        self._check(requests, first_prompt_index)
        if seed is None:
            self._next_prompt_index += len(encoded)
        responses = []
        for number, got in enumerate(respond(self._open_worker().engine, requests, self._mesh, self._world)):
            prompt = number // num_samples
            if got.finish == "failed":
                raise EngineError(f"RolloutWorker.generate: prompt {prompt}: {got.error}")
            text = None if self.tokenizer is None else self.tokenizer.decode(got.tokens.tolist())
            responses.append(
                Generated(prompt=prompt, text=text, tokens=got.tokens, log_probs=got.log_probs, finish=got.finish)
            )
        return responses

    def update_weights(self, model: Any) -> None:
        """Generate with other weights of the same shape from now on. Collective: all ranks.

        Args:
            model: As the class takes it; or a trainer, whose actor has the same shape: its weights as they now are,
                from its layout into this one without a file between.

        Raises:
            ConfigError: It is another kind of model.
            CheckpointError: Its tensors are others.
        """
        model, _ = _of_part(model, None)
        worker = self._open_worker()
        worker.load(model)
        self._version += 1
        if worker.engine is not None:
            worker.engine.version = self._version
            worker.engine.weights_changed()

    def as_flow(self) -> RoleFlow:
        """Return the source of a flow whose policy is the model. Its weights here are freed: the flow has its own.

        Raises:
            ConfigError: The engine samples for no trainer, or the worker has other weights than those of its model.
        """
        kept, tokenizer, mesh, engine, sizes = self._given
        model = kept()
        if engine == "hf" or self._version > 0:
            why = "engine='hf' samples for no trainer" if engine == "hf" else "its weights were updated"
            raise ConfigError(f"RolloutWorker: {why}, so that it is no node of a flow; give Actor(path).sample()")
        if model is None:
            raise ConfigError("RolloutWorker: the model is gone; keep it in a variable until the flow is there")
        if isinstance(model, HybridActor):
            actor = model.as_actor()
        elif isinstance(model, Actor):
            actor = model
        else:
            given: dict[str, Any] = {key: size for key, size in sizes.items() if size > 1}
            actor = Actor(model, tokenizer, **given)
        self._worker = None
        sampling = {"rollout": {"engine": {"kind": "vllm"}}} if engine == "vllm" else {}
        parts = (actor, Part(settings_of_mesh(mesh)), Part(sampling))
        return replace(actor.sample(), parts=parts)

    def _open_worker(self) -> MegatronWorker | VllmWorker | UserWorker | HFWorker | HybridWorker:
        """Return what generates. Raises ConfigError: a flow has it."""
        if self._worker is None:
            raise ConfigError("RolloutWorker: is the policy of a flow, which samples; make another one to generate")
        return self._worker

    def _check(self, requests: list[Request], first_prompt_index: int) -> None:
        """Refuse, alike on all ranks, what an engine would refuse on those that are to meet it."""
        for request in requests:
            reason = length_refusal(request, self._open_worker().max_context, "the model's context")
            if reason is None and request.params.has_texts and self.tokenizer is None:
                reason = "stop texts need a tokenizer; give tokenizer=…, or stop_ids"
            if reason is not None:
                raise DataError(f"RolloutWorker.generate: prompt {request.prompt_index - first_prompt_index}: {reason}")

    def _encoded(self, prompts: Any) -> list[Tensor]:
        if isinstance(prompts, Mapping) and "input_ids" in prompts:
            # Which ids there are the engine knows.
            limits = {"vocab_size": torch.iinfo(torch.int64).max, "most_tokens": self._open_worker().max_context}
            return token_rows(prompts["input_ids"], prompts.get("attention_mask"), **limits).sequences
        if isinstance(prompts, str | Mapping):
            raise DataError(
                f"RolloutWorker.generate: found one {type(prompts).__name__}, expected a list of prompts; give "
                '["…"], token ids of each, or input_ids with their attention_mask'
            )
        rows = []
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str) or are_messages(prompt):
                prompt = self._encoded_text(prompt, number)
            try:
                rows.append(torch.as_tensor(prompt, dtype=torch.int64))
            except (TypeError, ValueError, RuntimeError):
                raise DataError(
                    f"prompt {number}: found {prompt!r:.60}, expected text, a list of messages, or token ids"
                ) from None
            if rows[-1].dim() != 1 or len(rows[-1]) == 0:
                raise DataError(f"prompt {number}: found shape {[*rows[-1].shape]}, expected token ids, at least one")
        return rows

    def _encoded_text(self, prompt: str | list[Any], number: int) -> list[int]:
        """Return the tokens of a text, or of a conversation, whose template decides about its beginning."""
        if self.tokenizer is None:
            raise DataError(f"prompt {number}: is text, and there is no tokenizer; give tokenizer=…, or token ids")
        if isinstance(prompt, str):
            return [*start_of(self.tokenizer), *self.tokenizer.encode(prompt)]
        template = chat_template(self.tokenizer)
        if template is None:
            raise DataError(f"prompt {number}: has messages, and {self.tokenizer.path} no chat_template; give the text")
        return self.tokenizer.encode(render_chat(template, self.tokenizer, read_messages(prompt, f"prompt {number}")))


def _kept(model: Any) -> Callable[[], Any]:
    """Return what gives the model again; of a module in memory only as long as the program has it."""
    return weakref.ref(model) if isinstance(model, torch.nn.Module) else lambda: model


def _of_part(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return the model and tokenizer of an ``Actor``; other models unchanged."""
    if not isinstance(model, Part):
        return latest_actor(find_model(str(model))) if isinstance(model, str | Path) else model, tokenizer
    path = model.settings.get("model", {}).get("path")
    found = model.objects.get("actor", path)
    if found is None:
        raise ConfigError("RolloutWorker: the actor has neither a directory nor a model in memory; give it one")
    return found, model.tokenizer if tokenizer is None else tokenizer


def _tokenizer(model: Any, tokenizer: Any) -> Tokenizer | None:
    if tokenizer is None:
        found = tokenizer_in(model) if isinstance(model, str | Path) else None
        return None if found is None else open_tokenizer(found)
    if isinstance(tokenizer, str | Path):
        return open_tokenizer(tokenizer)
    if hasattr(tokenizer, "save_pretrained") and getattr(tokenizer, "is_fast", False):
        with tempfile.TemporaryDirectory(prefix="hybridflow-tokenizer-") as folder:
            tokenizer.save_pretrained(folder)
            return open_tokenizer(folder)
    if not hasattr(tokenizer, "stop_ids"):
        raise ConfigError(
            f"tokenizer: found {type(tokenizer).__name__}; give a path, or a fast tokenizer of transformers"
        )
    found_one: Tokenizer = tokenizer
    return found_one


def _mesh(world: World, device_mesh: DeviceMesh | None, tp: int, pp: int, engine: str) -> geometry.DeviceMesh:
    ranks = tuple(range(world.size)) if device_mesh is None else device_mesh.rollout_ranks
    layout = None if device_mesh is None else device_mesh.layout
    if layout is None:
        layout = ParallelLayout(tp=tp, pp=pp, dp=max(1, len(ranks) // (tp * pp)))
    elif tp * pp > 1:
        raise ConfigError(f"RolloutWorker: the mesh's groups say {layout}; leave tensor and pipeline sizes out")
    if engine == "hf" and layout.tp * layout.pp > 1:
        raise ConfigError("RolloutWorker: engine='hf' has the whole model on every rank; leave sizes out")
    if engine == "vllm" and (layout.tp * layout.pp > 1 or len(ranks) != world.size):
        raise ConfigError("RolloutWorker: engine='vllm' has the whole model on every rank; leave sizes and devices out")
    return geometry.DeviceMesh(name="RolloutWorker", layout=layout, ranks=ranks, ranks_per_node=world.ranks_per_node)

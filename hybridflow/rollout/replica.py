"""One data-parallel replica of a model, as it generates: what it can answer, and its steps through the stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow.data.images import FIRST_ID
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.models.attention import PackedAttention
from hybridflow.models.gpt import Transformer
from hybridflow.rollout.blocks import BLOCK_TOKENS, blocks_for, kept_states
from hybridflow.rollout.budget import cache_bytes
from hybridflow.rollout.paged import block_bytes, state_bytes
from hybridflow.rollout.request import LOOK_STEPS, Request, SamplingParams, model_refusal
from hybridflow.rollout.runner import make_runner
from hybridflow.rollout.texts import Texts

TakeTokens = Callable[[], Tensor]
"""Waits for the tokens of a step, ``[rows]`` int64 in host memory."""


class Replica:
    """Computes what sessions plan on one replica of a model; all its ranks make the same calls with the same arguments.

    Replicas that share experts compute in lockstep: whoever has nothing to compute takes part with a blank token, until
    all of them have come to ``finish``.

    Args:
        model: This rank's stage and shard.
        groups: This rank's process groups.
        vocab_size: True vocabulary.
        seed: Seed of the noise.
        max_concurrent: Most sequences decoded together.
        cache_memory: Most memory of the key-value cache on this rank, and of states beside it: in bytes, or, below 1, a
            share of what is free when generating begins.
        ranks_per_node: Ranks that share the memory of this rank's node.
        tokenizer: Tokenizer for stop and bad texts; None: requests may have none.
        keeps_choices: Whether responses tell the experts that each token was sent to.

    Attributes:
        version: Number of the weights, noted beside each token; the caller's to set.
        num_changes: How often the weights have changed.
        metrics: Metrics of the last session that came to its end; set by who ended it.
        runner: Computes the model, over a cache of its own making.
        keeps_choices: Whether responses tell the experts that each token was sent to.
        has_states: Whether a layer of any stage has states by slot.
    """

    def __init__(
        self,
        model: Transformer,
        groups: ProcessGroupCollection,
        *,
        vocab_size: int,
        seed: int,
        max_concurrent: int,
        cache_memory: float = 0.5,
        ranks_per_node: int = 1,
        tokenizer: Tokenizer | None = None,
        keeps_choices: bool = False,
    ) -> None:
        self.keeps_choices = keeps_choices
        self.version = 0
        self.metrics: dict[str, float] = {}
        self.model = model
        self.groups = groups
        self.vocab_size = vocab_size
        self.seed = seed
        self._tokenizer = tokenizer
        self._texts: Texts | None = None
        self.device = next(model.parameters()).device
        self._max_concurrent = max_concurrent
        self._cache_memory = cache_memory
        self._ranks_per_node = ranks_per_node
        self._most_blocks, self._most_slots, self._block_bytes = 0, max_concurrent, 0
        self.has_states = False
        self._stage_ranks = dist.get_process_group_ranks(groups.pp)
        self.runner = make_runner(
            model, groups, vocab_size, max_rows=max_concurrent, max_steps=LOOK_STEPS, keeps_choices=keeps_choices
        )
        self._sent: tuple[dist.Work, Tensor] | None = None
        self.num_changes = 0
        mates, own = (dist.get_process_group_ranks(group) for group in (groups.tp_ep, groups.tp))
        self._is_in_lockstep = model.config.num_moe_experts is not None and not {*mates} <= {*own}

    def weights_changed(self) -> None:
        """Drop what was derived from the model's weights, and free its memory.

        An open session goes on with the new weights: it recomputes its cache.
        """
        self.runner.forget()
        self.num_changes += 1

    def prepare(self) -> None:
        """Derive from the weights what the quick path needs, if it is not there."""
        self.runner.prepare()

    def refusal(self, request: Request) -> str | None:
        """Return why a request cannot be met, or None if it can."""
        reason = model_refusal(request, self.model.max_sequence_length, self.vocab_size)
        if reason := reason or self._text_refusal(request.params):
            return reason
        if self.model.images is None and bool((request.prompt >= FIRST_ID).any()):
            return "it has images, and the model reads none here; set data.images_field"
        if request.params.num_top_log_probs and request.begun is not None and len(request.begun.tokens):
            return "num_top_log_probs: ask for them where it begins"
        num_prompt, most = len(request.prompt), request.params.max_new_tokens
        if blocks_for(num_prompt + most) > self._most_blocks:
            block, asked = self._block_bytes, self._cache_memory
            beside = " beside the states of linear attention" if self.has_states else ""
            return (
                f"its {num_prompt} tokens and max_new_tokens={most} take {blocks_for(num_prompt + most) * block} bytes "
                f"of the key-value cache, and cache_memory={asked:g} "
                f"{'of what is free ' if asked < 1 else ''}gives {self._most_blocks * block}{beside}; raise it, "
                "shorten the prompt, or ask for fewer tokens"
            )
        return None

    def _text_refusal(self, params: SamplingParams) -> str | None:
        """Return which stop or bad text cannot be looked for, or None if all can.

        There is no tokenizer, or it is a special token's name, which no response's text has.
        """
        if params.has_texts and self._tokenizer is None:
            return "it has stop or bad texts, and there is no tokenizer to look for them with; give the engine one"
        instead = {"stop": "stop_ids=({},)", "bad": "bad_ids=(({},),)"}
        for kind, name in [*(("stop", name) for name in params.stop), *(("bad", name) for name in params.bad)]:
            assert self._tokenizer is not None, "refused before"
            if (index := self._tokenizer.special_id(name)) is not None:
                return (
                    f"its {kind} text {name!r} is a special token, which is left out of texts; give "
                    f"{instead[kind].format(index)}"
                )
        return None

    @property
    def most_tokens(self) -> int:
        """Return the longest sequence for which ``measure`` has found room: in the context and the cache."""
        context: int = self.model.max_sequence_length
        return min(context, self._most_blocks * BLOCK_TOKENS)

    def texts(self) -> Texts:
        """Return the tokenizer for requests with texts; such requests are refused without one."""
        if self._texts is None:
            assert self._tokenizer is not None, "such a request is refused"
            self._texts = Texts(self._tokenizer)
        return self._texts

    def room(self, expected: Sequence[Request] | None) -> tuple[int, int, int]:
        """Return slots, longest sequence and blocks for the expected requests, or for any."""
        if expected is None:
            return self._most_slots, self.model.max_sequence_length, max(self._most_blocks, 1)
        lengths = sorted((len(each.prompt) + each.params.max_new_tokens for each in expected), reverse=True)
        lengths = lengths[: self._most_slots]
        # Lanes may be dealt unevenly, but not more than all to one.
        num_blocks = sum(map(blocks_for, lengths))
        return max(len(lengths), 1), max(lengths, default=1), max(min(num_blocks, self._most_blocks), 1)

    def run(self, tokens: Tensor, attention: Any, rows: Tensor) -> Tensor | None:
        """Run this stage's part of a forward pass, with an attention that the runner made. Collective: tp, ep.

        Return logits of the rows, ``[rows, padded_vocab/tp]``, on the last stage.
        """
        self._meet(has_work=True)
        return self._through(self.runner, tokens, attention, rows)

    @torch.inference_mode()
    def finish(self) -> None:
        """Take part in what replicas that share experts with this one still compute.

        Collective: ep. To be called after the last step of a session.
        """
        while self._meet(has_work=False):
            tokens = torch.zeros(1, dtype=torch.int64, device=self.device)
            attention = PackedAttention([1], self.device)
            attention.can_split = False
            self._through(self.model, tokens, attention, tokens)

    def _meet(self, *, has_work: bool) -> bool:
        """Return whether a replica that shares experts with this one has something to compute. Collective: ep."""
        if not self._is_in_lockstep:
            return False
        working = torch.tensor(has_work, dtype=torch.int32, device=self.device)
        dist.all_reduce(working, group=self.groups.tp_ep)
        return has_work or bool(working)

    def _through(self, compute: Callable[..., Tensor], tokens: Tensor, attention: Any, rows: Tensor) -> Tensor | None:
        stage, stages = self.groups.pp.rank(), self._stage_ranks
        config = self.model.config
        if stage > 0:
            hidden = torch.empty(len(tokens), 1, config.hidden_size, dtype=config.params_dtype, device=self.device)
            dist.recv(hidden, src=stages[stage - 1], group=self.groups.pp)
            self.model.set_input_tensor(hidden)
        output = compute(tokens, attention, rows)
        if self.model.post_process:
            return output
        if self._sent is not None:
            self._sent[0].wait()
        # Kept until it has left.
        output = output.contiguous()
        self._sent = _send(output, stages[stage + 1], self.groups.pp), output
        return None

    def send_tokens(self, tokens: Tensor) -> TakeTokens:
        """Begin to bring tokens from the last stage to the host memory of all stages; what ends it gives them.

        Those of a GPU leave with the end, through the host: on one way with the hidden states, which go in the other
        direction, each stage would wait for the other.
        """
        others = self._stage_ranks[:-1]
        if tokens.device.type == "cpu":
            sends = [_send(tokens, rank, self.groups.pp) for rank in others]
            return functools.partial(_wait_for, tokens, sends)
        found = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        found.copy_(tokens, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def send() -> Tensor:
            copied.synchronize()
            return _wait_for(found, [_send(found, rank, self.groups.pp) for rank in others])

        return send

    def receive_tokens(self, num_tokens: int) -> TakeTokens:
        """Return what receives the tokens of the last stage, on any other."""

        def receive() -> Tensor:
            tokens = torch.empty(num_tokens, dtype=torch.int64)
            dist.recv(tokens, src=self._stage_ranks[-1], group=self.groups.pp)
            return tokens

        return receive

    def measure(self) -> None:
        """Find how many slots, and blocks of the cache, the memory budget allows on each rank of the replica.

        They are no more than can ever be needed.

        Collective: tp, pp.
        """
        num_bytes = cache_bytes(self._cache_memory, self.device, self._ranks_per_node)
        block, state, lanes = block_bytes(self.model), state_bytes(self.model), self.groups.pp.size()
        slots = self._max_concurrent
        if state:
            # At most half of the budget, those that are kept included, but a slot in each lane.
            most = num_bytes // 2 // (state * lanes)
            slots = min(slots, max(most - kept_states(most), 1) * lanes)
        # Lanes have as many slots each.
        each = -(-slots // lanes)
        left = num_bytes - (each + kept_states(each)) * lanes * state
        blocks = slots * blocks_for(self.model.max_sequence_length)
        if left < 0 or block:
            blocks = min(max(left, 0) // max(block, 1), blocks)
        # A stage may have layers of one kind alone; all of them plan the same.
        allowed = torch.tensor([blocks, slots, state == 0, -block], device=self.device)
        for group in (self.groups.tp, self.groups.pp):
            if group.size() > 1:
                dist.all_reduce(allowed, dist.ReduceOp.MIN, group=group)
        self._most_blocks, self._most_slots, is_stateless, block = allowed.tolist()
        self.has_states, self._block_bytes = not is_stateless, -block


def _send(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> dist.Work:
    """Begin to send a tensor to a rank of a group that this rank is in."""
    work = dist.isend(tensor, dst=rank, group=group)
    assert work is not None, "a rank sends only in its own groups"
    return work


def _wait_for(tokens: Tensor, sends: Sequence[dist.Work]) -> Tensor:
    for send in sends:
        send.wait()
    return tokens

"""Sums of gradients during the backward pass, and gathering of weights during the next forward pass.

megatron-core starts a collective once a bucket is complete, or is needed. That takes equal passes on all replicas.
Here replicas differ: one may have no micro-batch, or take no part in a forward pass without gradients. A replica whose
collectives come in another order would add up the wrong buckets, or wait for ever. So each rank starts its buckets in
one order, which depends on the model alone, and starts at the end what its passes have not reached.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn


class Overlap:
    """The buckets of one rank's part of a model.

    Args:
        ddps: megatron-core's wrapper of each virtual pipeline chunk, made with ``overlap_grad_reduce``. With
            ``overlap_param_gather`` weights are gathered here too.
        models: The models in them, the chunk that computes first before the others.
    """

    def __init__(self, ddps: Sequence[DistributedDataParallel], models: Sequence[GPTModel]) -> None:
        parameters = [parameter for ddp in ddps for parameter in ddp.params_with_grad]
        places = {parameter: place for place, parameter in enumerate(parameters)}
        # Dense layers and experts have buckets of their own, and may have one process group. A bucket is complete with
        # the gradient of its first parameter, which comes last.
        buckets = [each for ddp in ddps for each in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)]
        self._buckets = sorted(buckets, key=lambda bucket: -min(places[each] for each in bucket.params))
        self._gathers = ddps[0].use_forward_hook
        self._missing: dict[Any, set[nn.Parameter]] = {}
        self._unreduced: deque[Any] = deque()
        self._ungathered: deque[Any] = deque()
        for bucket in self._buckets:
            bucket.register_grad_ready = functools.partial(self._register, bucket)
        if self._gathers:
            # These gather in every forward pass, also in one that a replica leaves out.
            for ddp, model in zip(ddps, models, strict=True):
                ddp.disable_forward_pre_hook(param_sync=False)
                self._wait_before_layers(model)
            models[-1].register_forward_hook(lambda *_: self.gather())

    def begin(self) -> None:
        """Take up new gradients, after ``zero_grad_buffer``. ``no_sync`` ends where the last backward pass begins."""
        self._missing = {bucket: set(bucket.params) for bucket in self._buckets}
        self._unreduced = deque(self._buckets)
        for bucket in self._buckets:
            bucket.is_last_microbatch = False

    def finish(self) -> None:
        """Start the collectives that this rank's passes have not started; ``finish_grad_sync`` waits for the sums."""
        self.gather()
        while self._unreduced:
            self._unreduced.popleft().start_grad_sync()

    def start_gathering(self) -> None:
        """Begin to gather the weights that the replicas have stepped. Collective: dp."""
        if self._gathers and self._buckets:
            self._ungathered = deque(reversed(self._buckets))
            self._ungathered[0].start_param_sync()

    def gather(self) -> None:
        """Wait until all weights are gathered. Collective: dp, after ``start_gathering``; else nothing is done."""
        while self._ungathered:
            self._gather_next()

    def _register(self, bucket: Any, parameter: nn.Parameter, force_all_reduce: bool | None = False) -> None:
        """Note a gradient, in the place of ``register_grad_ready``; start the reductions whose turn it is."""
        if not bucket.is_last_microbatch:
            return
        assert parameter in self._missing[bucket], "a backward pass completes a gradient once"
        self._missing[bucket].remove(parameter)
        while self._unreduced and not self._missing[self._unreduced[0]]:
            self._unreduced.popleft().start_grad_sync()

    def _gather_next(self) -> None:
        """Wait for the next bucket, and start the one behind it, so that there is always one under way."""
        self._ungathered.popleft().finish_param_sync(skip_next_bucket_dispatch=True)
        if self._ungathered:
            self._ungathered[0].start_param_sync()

    def _wait_before_layers(self, model: GPTModel) -> None:
        """Have each layer wait for the buckets that its weights are in.

        A layer waits as a whole, since some modules read the weights of others.
        """
        number = {each: place for place, bucket in enumerate(reversed(self._buckets)) for each in bucket.params}
        decoder = model.decoder
        for layer in (*model.children(), *decoder.children(), *decoder.layers):
            needed = [number[each] for each in layer.parameters() if each in number]
            if needed and layer is not decoder and layer is not decoder.layers:
                layer.register_forward_pre_hook(functools.partial(self._gather_up_to, max(needed)))

    def _gather_up_to(self, last: int, *_: object) -> None:
        while self._ungathered and len(self._buckets) - len(self._ungathered) <= last:
            self._gather_next()

"""A model in training: megatron-core's DDP, 1F1B schedule, distributed optimizer and gradient clipping around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_schedule_table,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from hybridflow.config.roles import OptimizerConfig
from hybridflow.errors import DivergedError
from hybridflow.models.flops import ModelFlops
from hybridflow.models.gpt import Transformer
from hybridflow.models.layers import Chunks, chunks_of, recomputed
from hybridflow.models.microbatch import MicroBatch, blank
from hybridflow.models.overlap import Overlap
from hybridflow.models.specs import logical_parameters
from hybridflow.observe.work import add_work
from hybridflow.parallel.accelerators import fuse_weight_gradients, use_cpu_optimizer, use_gpu_optimizer
from hybridflow.parallel.megatron import gathering_within
from hybridflow.reshard.memory import HostOffload

_BLANK = object()
"""What is kept of a micro-batch without samples."""

LossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, Any]]
"""``(output of the last stage, micro-batch) -> (loss share, anything to keep)``.

The loss shares of all micro-batches and data-parallel ranks add up to the loss: denominators are those of the global
batch.
"""


def finite(norm: float, rate: float | None) -> float:
    """Return the norm of a gradient.

    Args:
        norm: The norm.
        rate: The learning rate, for the message; None: this rank does not know it.

    Raises:
        DivergedError: It is not finite.
    """
    if not math.isfinite(norm):
        this = "" if rate is None else f" (here {rate:g})"
        raise DivergedError(
            f"the norm of the gradient is {norm:g}, expected a finite number; nothing is saved after this update. Look "
            f"at the loss and the rewards before it, lower the learning rate{this}, and go on from the last checkpoint"
        )
    return norm


class Trainable:
    """One rank's part of a model in training. What requires no gradient has neither gradient nor state.

    Args:
        model: The bare model, or its virtual pipeline chunks.
        groups: This rank's process groups.
        settings: How it learns.
        bucket_size: Elements of gradients that are summed together during the backward pass. Weights are then gathered
            during the forward pass. None: both wait for the end of the pass, and the step.

    Attributes:
        model: The bare model or its chunks, for forward passes and weights.
        is_distributed: Whether optimizer state is cut over the data-parallel ranks.
    """

    def __init__(
        self,
        model: Transformer | Chunks,
        groups: ProcessGroupCollection,
        settings: OptimizerConfig,
        *,
        bucket_size: int | None = None,
    ) -> None:
        chunks: list[Transformer] = chunks_of(model)
        config = chunks[0].config
        self.model = model
        self.is_distributed = settings.distributed
        self._groups = groups
        self._config = config
        self._updates = 0
        self._is_frozen = any(not parameter.requires_grad for parameter in model.parameters())
        config.finalize_model_grads_func = self._finalize
        # The sum over replicas is wanted, not the mean: with per-token loss megatron-core scales by nothing.
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=settings.distributed,
            average_in_collective=False,
            overlap_grad_reduce=bucket_size is not None,
            overlap_param_gather=bucket_size is not None and settings.distributed,
            bucket_size=bucket_size,
        )
        self._ddp = [DistributedDataParallel(chunk.config, ddp_config, chunk, pg_collection=groups) for chunk in chunks]
        self._overlap = None if bucket_size is None else Overlap(self._ddp, chunks)
        self._optimizer = _make_adam(self._ddp, groups, config, settings)
        for optimizer, inner in self._inner_optimizers():
            if any(group["is_expert_parallel"] for group in inner.param_groups):
                # By this group the norm tells which rank counts what is whole on all: here biases of experts.
                optimizer.tp_group = groups.expt_tp
        on_gpu = next(model.parameters()).device.type == "cuda"
        tune = use_gpu_optimizer if on_gpu else use_cpu_optimizer
        tune(inner for _, inner in self._inner_optimizers())
        self._fused = {*model.modules()} - {*recomputed(model)} if on_gpu else set()

    @torch.enable_grad()
    def accumulate(self, micro_batches: list[MicroBatch], loss: LossFunction) -> list[Any]:
        """Run forward and backward over this rank's micro-batches; gradients are summed over the replicas at the end.

        Collective: tp, cp, pp, dp. A replica without samples passes no micro-batch and still takes part.

        Returns:
            What ``loss`` gave for each micro-batch; empty but on the last stage.
        """
        self.begin()
        micro_batches = equally_many(self.model, self._groups, micro_batches)
        if not micro_batches:
            self.finish()
            return []
        count_work(self.model, micro_batches, _num_sharers(self._groups), is_training=True, is_frozen=self._is_frozen)
        return run_schedule(self._ddp, self._config, self._groups, micro_batches, loss, forward_only=False)

    def begin(self) -> None:
        """Set the gradients to zero, for backward passes of one's own; without pipeline stages."""
        if self._fused:
            # Such a layer returns an unfilled tensor as its gradient, in which torch's search for NaN would find some.
            fuse_weight_gradients(self._fused, not torch.is_anomaly_enabled())
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        if self._overlap is not None:
            self._overlap.begin()
        for transformer in chunks_of(self.model):
            if transformer.dropout is not None:
                transformer.dropout.update = self._updates

    def finish(self) -> None:
        """Sum the gradients of these over the replicas. Collective: tp, dp."""
        self._finalize(self._ddp)

    def step(self, *, is_followed: bool = False) -> float:
        """Clip the gradients, update the weights, and return the gradient norm before clipping.

        Collective: tp, pp, dp.

        Args:
            is_followed: ``accumulate`` comes next, and may gather the weights during its forward pass. Who reads them
                before then calls ``gather`` first.

        Raises:
            DivergedError: The norm is not finite. The weights are not either, from here on.
        """
        succeeded, grad_norm, _ = self._optimizer.step()
        assert succeeded, "without loss scaling no step is ever skipped"
        norm = finite(float(grad_norm), self.learning_rate())
        if self._overlap is not None:
            self._overlap.start_gathering()
        if not is_followed:
            self.gather()
        self._updates += 1
        return norm

    def gather(self) -> None:
        """Wait for weights that a step has left to be gathered. Collective: dp, where a step has."""
        if self._overlap is not None:
            self._overlap.gather()

    def reload_weights(self) -> None:
        """Take up weights that were written from outside: of those that are not fp32, the optimizer steps copies."""
        self._optimizer.reload_model_params()

    def set_learning_rate(self, lr: float) -> None:
        """Use another learning rate from the next step on."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def learning_rate(self) -> float | None:
        """Return the rate of the next step; None on a rank that steps nothing."""
        groups = self._optimizer.param_groups
        return float(groups[0]["lr"]) if groups else None

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state that each parameter's step needs: kind -> logical name -> flat live storage.

        Kinds are ``exp_avg``, ``exp_avg_sq``, ``master`` (fp32 weights where they are not the model's own) and
        ``gradient`` (summed over replicas, between ``accumulate`` and ``step``). With a distributed optimizer the
        tensors are this rank's ``state_ranges``, else whole local parameters.
        """
        found: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("exp_avg", "exp_avg_sq", "master", "gradient")}
        names = {id(parameter): name for name, parameter in logical_parameters(self.model).items()}
        moments = {id(main): inner.state[main] for inner, group in self._parameter_groups() for main in group["params"]}
        for parameter, main, (start, stop) in self._main_parameters():
            name = names[id(parameter)]
            for kind in ("exp_avg", "exp_avg_sq"):
                found[kind][name] = moments[id(main)][kind].view(-1)
            if main.dtype != parameter.dtype:
                found["master"][name] = main.data.view(-1)
            found["gradient"][name] = parameter.main_grad.view(-1)[start:stop]  # type: ignore[attr-defined]
        return found

    def state_ranges(self) -> dict[str, tuple[int, int]]:
        """Return logical name -> (start, stop), the elements of the local parameter whose state is in ``state``."""
        names = {id(parameter): name for name, parameter in logical_parameters(self.model).items()}
        return {names[id(parameter)]: kept for parameter, _, kept in self._main_parameters()}

    def num_steps(self) -> int | None:
        """Return the optimizer steps so far; None if this rank keeps no state that would tell."""
        for inner, group in self._parameter_groups():
            if not isinstance(inner, torch.optim.AdamW):
                return int(group.get("step", 0))
            for parameter in group["params"]:
                return int(inner.state[parameter]["step"])
        return None

    def set_num_steps(self, steps: int) -> None:
        """Go on as after so many optimizer steps."""
        self._updates = steps
        for inner, group in self._parameter_groups():
            if isinstance(inner, torch.optim.AdamW):
                for parameter in group["params"]:
                    inner.state[parameter]["step"].fill_(steps)
            else:
                group["step"] = steps

    def _main_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor, tuple[int, int]]]:
        """Yield the parameters that this rank steps: the model's, the stepped one, and its range in the model's."""
        for optimizer, _ in self._inner_optimizers():
            for parameter, main in _pairs(optimizer):
                kept = (0, parameter.numel())
                if isinstance(optimizer, DistributedOptimizer):
                    found = optimizer._get_model_param_range_map(parameter)["param"]
                    kept = (found.start, found.end)
                yield parameter, main, kept

    def _finalize(self, models: list[Any], num_tokens: Tensor | None = None, **_: Any) -> None:
        if self._overlap is not None:
            self._overlap.finish()
        # megatron-core then sums over the tensor-parallel ranks what is marked; forward passes are switched one by one.
        self._config.sequence_parallel = chunks_of(self.model)[0].sequence_switch is not None
        # num_tokens is left out: the loss is already divided by the global batch's counts.
        finalize_model_grads(models, None, pg_collection=self._groups)
        self._config.sequence_parallel = False

    def offload(self, owner: str) -> HostOffload:
        """Return what moves the optimizer's state to host memory and back; gradients are freed and come back as zeros.

        Args:
            owner: Name of the owner, in errors.
        """
        state = self.state()
        kept = [tensor for kind in ("exp_avg", "exp_avg_sq", "master") for tensor in state[kind].values()]
        parameters = [parameter for chunk in chunks_of(self.model) for parameter in chunk.parameters()]
        gradients = [parameter.main_grad for parameter in parameters if parameter.requires_grad]
        return HostOffload(kept, zeroed=gradients, owner=owner)

    def reset_optimizer(self) -> None:
        """Forget all moments and the step count, and keep the weights."""
        forget_moments(self.state())
        self.set_num_steps(0)

    def _inner_optimizers(self) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
        """Yield megatron-core's optimizers that step something, each with the one inside."""
        for optimizer in self._optimizer.chained_optimizers:
            if not getattr(optimizer, "is_stub_optimizer", False):
                yield optimizer, optimizer.optimizer

    def _parameter_groups(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """Yield the groups of the inner optimizers, with their state there from the start."""
        for optimizer, inner in self._inner_optimizers():
            optimizer.init_state_fn(inner)
            for group in inner.param_groups:
                if isinstance(inner, torch.optim.AdamW):
                    # megatron-core makes the moments; torch then takes its own count to be there too.
                    for parameter in group["params"]:
                        device = parameter.device if group["fused"] else None
                        inner.state[parameter].setdefault("step", torch.tensor(0.0, device=device))
                yield inner, group


def _make_adam(
    ddps: list[DistributedDataParallel], groups: ProcessGroupCollection, config: Any, settings: OptimizerConfig
) -> Any:
    """Return megatron-core's Adam for a model's chunks, each in its DDP; ``config`` is that of the model."""
    with gathering_within(groups.intra_dist_opt):
        optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                weight_decay=settings.weight_decay,
                clip_grad=settings.clip_grad,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=settings.distributed,
            ),
            ddps,
            use_gloo_process_groups=False,
            pg_collection=groups,
        )
    for group in optimizer.param_groups:
        # Megatron-LM's scheduler of rates does this, which is not used here: norms and biases do not decay.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    return optimizer


def forget_moments(state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Set the moments in an optimizer's ``state`` to zero."""
    for kind in ("exp_avg", "exp_avg_sq"):
        for tensor in state[kind].values():
            tensor.zero_()


def _pairs(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield the model's parameters, and those that one of megatron-core's optimizers steps in their place."""
    if isinstance(optimizer, DistributedOptimizer):
        groups = [
            *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
            *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
        ]
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        own = optimizer.fp32_from_fp32_groups
        groups = [
            *zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True),
            *zip(own, own, strict=True),
        ]
    else:
        groups = [(group["params"], group["params"]) for group in optimizer.optimizer.param_groups]
    for models, mains in groups:
        yield from zip(models, mains, strict=True)


class _Neighbors(P2PCommunicator):
    """Messages between neighboring stages, without their shapes: every stage has all micro-batches, and knows them.

    Args:
        group: Stages of the pipeline.
        config: megatron-core's.
        lengths: Tokens of each micro-batch that a stage hands on, in order. Both ways they come in the order in which
            stages compute.
        num_chunks: Virtual pipeline chunks of each stage.
    """

    def __init__(self, group: dist.ProcessGroup, config: Any, lengths: Sequence[int], num_chunks: int) -> None:
        super().__init__(pp_group=group, config=config)
        per_chunk = len(lengths) if num_chunks == 1 else group.size()
        order = get_schedule_table(len(lengths), num_chunks, per_chunk)
        # Backwards the chunks come from the last to the first: the one that nothing follows is the last of the table.
        between = [lengths[index] for index, chunk in order if chunk < num_chunks - 1]
        every = [lengths[index] for index, _ in order]
        self._forward, self._backward = (
            ((length, 1, config.hidden_size) for length in (between if has_wrapped else every))
            for has_wrapped in (group.rank() == 0, group.rank() == group.size() - 1)
        )

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the shapes of what comes from the previous stage and from the next, if anything comes."""
        return next(self._forward) if recv_prev else None, next(self._backward) if recv_next else None


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    config: Any,
    groups: ProcessGroupCollection,
    micro_batches: list[MicroBatch],
    loss: LossFunction,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run megatron-core's own schedule over packed micro-batches: 1F1B through the stages, or plain accumulation.

    With virtual pipeline chunks 1F1B is interleaved, which takes a multiple of ``pp`` micro-batches.

    Args:
        chunks: The model, or its virtual pipeline chunks in order; in training each in megatron-core's DDP.
        config: megatron-core's.
        groups: This rank's process groups.
        micro_batches: Those of this replica, at least one.
        loss: What the last stage makes of an output.
        forward_only: Without gradients.

    Returns:
        What ``loss`` gave beside the loss for each micro-batch that is not blank; empty but on the last stage.
    """

    def forward_step(batches: Iterator[MicroBatch], stage: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        micro_batch = next(batches)
        output = stage(micro_batch.tokens, micro_batch.attention, micro_batch.rows)

        def finish(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            share, kept = (output.sum() * 0.0, _BLANK) if micro_batch.is_blank else loss(output, micro_batch)
            return share, torch.zeros([], dtype=torch.int, device=output.device), kept

        return output, finish

    if len(chunks) > 1:
        missing = -len(micro_batches) % groups.pp.size()
        micro_batches = [*micro_batches, *[blank(micro_batches[0].tokens.device, groups.cp)] * missing]
    arguments: dict[str, Any] = dict(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=groups,
    )
    # Sums over replicas begin in the last backward pass; a bare model has none.
    waits: list[Any] = [chunk.no_sync for chunk in chunks if hasattr(chunk, "no_sync")]
    config.no_sync_func = waits if len(chunks) > 1 else next(iter(waits), None)
    kept: list[Any]
    if groups.pp.size() == 1:
        kept = forward_backward_no_pipelining(**arguments)
    else:
        bare = chunks[0].module if isinstance(chunks[0], DistributedDataParallel) else chunks[0]
        assert isinstance(bare, Transformer), "FSDP has no stages"
        lengths = [bare.stage_tokens(len(each.tokens)) for each in micro_batches]
        sender = _Neighbors(groups.pp, config, lengths, len(chunks))
        run = forward_backward_pipelining_without_interleaving
        if len(chunks) > 1:
            run = forward_backward_pipelining_with_interleaving
        kept = run(**arguments, p2p_communicator=sender)
    return [each for each in kept if each is not _BLANK]


@torch.no_grad()
def forward_only(
    model: Transformer | Chunks,
    groups: ProcessGroupCollection,
    micro_batches: list[MicroBatch],
    compute: Callable[..., Any],
) -> list[Any]:
    """Run forward passes without gradients; keep what ``compute(output, micro_batch)`` returns, on the last stage.

    Collective: tp, cp, pp.
    """
    micro_batches = equally_many(model, groups, micro_batches)
    if not micro_batches:
        return []

    def loss(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Any]:
        return output.new_zeros(()), compute(output, micro_batch)

    count_work(model, micro_batches, _num_sharers(groups))
    chunks: list[Transformer] = chunks_of(model)
    return run_schedule(chunks, chunks[0].config, groups, micro_batches, loss, forward_only=True)


def _num_sharers(groups: ProcessGroupCollection) -> int:
    """Return the ranks that share the work of a replica."""
    return int(groups.tp.size() * groups.cp.size() * groups.pp.size())


def equally_many(
    model: Transformer | Chunks, groups: ProcessGroupCollection, micro_batches: list[MicroBatch]
) -> list[MicroBatch]:
    """Add blank micro-batches, so that all replicas that share a set of experts have equally many.

    Collective: ep.
    """
    config = chunks_of(model)[0].config
    is_apart = config.expert_model_parallel_size > 1 or groups.expt_tp.size() != groups.tp.size()
    if config.num_moe_experts is None or not is_apart or groups.tp_ep.size() == 1:
        return micro_batches
    device = next(model.parameters()).device
    most = torch.tensor(len(micro_batches), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=groups.tp_ep)
    return micro_batches + [blank(device, groups.cp) for _ in range(int(most) - len(micro_batches))]


def count_work(
    model: Transformer | Chunks,
    micro_batches: list[MicroBatch],
    num_ranks: int,
    *,
    is_training: bool = False,
    is_frozen: bool = False,
) -> None:
    """Add this rank's share of what micro-batches take; a prompt that several samples share is computed once.

    Args:
        model: The model, or its virtual pipeline chunks.
        micro_batches: Those of a replica.
        num_ranks: Ranks that share the work.
        is_training: Forward and backward, not forward alone.
        is_frozen: Some weights have no gradients.
    """
    whole: ModelFlops | None = chunks_of(model)[0].flops
    if whole is None:
        return
    tokens, pairs = sum(len(each.all_tokens) for each in micro_batches), sum(each.num_pairs for each in micro_batches)
    outputs = sum(len(each.rows) if each.dealt is None else len(each.dealt.index) for each in micro_batches)
    if is_training:
        flops = whole.training(tokens, pairs, outputs, is_frozen=is_frozen)
    else:
        flops = whole.forward(tokens, pairs, outputs)
    add_work(flops / num_ranks, sum(sum(each.lengths) for each in micro_batches) / num_ranks)


def sum_over(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return a function that sums a tensor over a group, in place. Collective: the group."""

    def add(value: Tensor) -> Tensor:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(value, group=group)
        return value

    return add

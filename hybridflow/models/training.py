"""A model in training: megatron-core's DDP, 1F1B schedule, distributed optimizer and gradient clipping around it."""

from __future__ import annotations

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
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from hybridflow.config.roles import OptimizerConfig
from hybridflow.models.gpt import Transformer
from hybridflow.models.microbatch import MicroBatch, blank
from hybridflow.models.overlap import Overlap
from hybridflow.models.specs import logical_parameters
from hybridflow.observe.work import add_work
from hybridflow.parallel.accelerators import use_gpu_optimizer
from hybridflow.parallel.megatron import gathering_within
from hybridflow.reshard.memory import HostOffload

_BLANK = object()
"""What is kept of a micro-batch without samples."""

LossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, Any]]
"""``(output of the last stage, micro-batch) -> (loss share, anything to keep)``.

The loss shares of all micro-batches and data-parallel ranks add up to the loss: denominators are those of the global
batch.
"""


class Trainable:
    """One rank's part of a model in training. What requires no gradient has neither gradient nor state.

    Args:
        model: The bare model.
        groups: This rank's process groups.
        settings: How it learns.
        bucket_size: Elements of gradients that are summed together during the backward pass. Weights are then gathered
            during the forward pass. None: both wait for the end of the pass, and the step.

    Attributes:
        model: The bare model, for forward passes and weights.
        is_distributed: Whether optimizer state is cut over the data-parallel ranks.
    """

    def __init__(
        self,
        model: Transformer,
        groups: ProcessGroupCollection,
        settings: OptimizerConfig,
        *,
        bucket_size: int | None = None,
    ) -> None:
        config = model.config
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
        self._ddp = DistributedDataParallel(config, ddp_config, model, pg_collection=groups)
        self._overlap = None if bucket_size is None else Overlap(self._ddp, model)
        with gathering_within(groups.intra_dist_opt):
            self._optimizer = get_megatron_optimizer(
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
                [self._ddp],
                use_gloo_process_groups=False,
                pg_collection=groups,
            )
        for group in self._optimizer.param_groups:
            # Megatron-LM's scheduler of rates does this, which is not used here: norms and biases do not decay.
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        if next(model.parameters()).device.type == "cuda":
            use_gpu_optimizer(inner for _, inner in self._inner_optimizers())

    def accumulate(self, micro_batches: list[MicroBatch], loss: LossFunction) -> list[Any]:
        """Run forward and backward over this rank's micro-batches; gradients are summed over the replicas at the end.

        Collective: tp, pp, dp. A replica without samples passes no micro-batch and still takes part.

        Returns:
            What ``loss`` gave for each micro-batch; empty but on the last stage.
        """
        self.begin()
        micro_batches = equally_many(self.model, self._groups, micro_batches)
        if not micro_batches:
            self.finish()
            return []
        ranks = self._groups.tp.size() * self._groups.pp.size()
        count_work(self.model, micro_batches, ranks, is_training=True, is_frozen=self._is_frozen)
        return run_schedule(self._ddp, self._config, self._groups, micro_batches, loss, forward_only=False)

    def begin(self) -> None:
        """Set the gradients to zero, for backward passes of one's own; without pipeline stages."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        if self._overlap is not None:
            self._overlap.begin()
        if self.model.dropout is not None:
            self.model.dropout.update = self._updates

    def finish(self) -> None:
        """Sum the gradients of these over the replicas. Collective: tp, dp."""
        self._finalize([self._ddp])

    def step(self, *, is_followed: bool = False) -> float:
        """Clip the gradients, update the weights, and return the gradient norm before clipping.

        Collective: tp, pp, dp.

        Args:
            is_followed: ``accumulate`` comes next, and may gather the weights during its forward pass. Who reads them
                before then calls ``gather`` first.
        """
        succeeded, grad_norm, _ = self._optimizer.step()
        assert succeeded, "without loss scaling no step is ever skipped"
        if self._overlap is not None:
            self._overlap.start_gathering()
        if not is_followed:
            self.gather()
        self._updates += 1
        return float(grad_norm)

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
        # num_tokens is left out: the loss is already divided by the global batch's counts.
        finalize_model_grads(models, None, pg_collection=self._groups)

    def offload(self, owner: str) -> HostOffload:
        """Return what moves the optimizer's state to host memory and back; gradients are freed and come back as zeros.

        Args:
            owner: Name of the owner, in errors.
        """
        state = self.state()
        kept = [tensor for kind in ("exp_avg", "exp_avg_sq", "master") for tensor in state[kind].values()]
        gradients = [parameter.main_grad for parameter in self.model.parameters() if parameter.requires_grad]
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
        lengths: Tokens of each micro-batch, in order. Both ways they come in that order.
    """

    def __init__(self, group: dist.ProcessGroup, config: Any, lengths: Sequence[int]) -> None:
        super().__init__(pp_group=group, config=config)
        self._forward = ((length, 1, config.hidden_size) for length in lengths)
        self._backward = ((length, 1, config.hidden_size) for length in lengths)

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the shapes of what comes from the previous stage and from the next, if anything comes."""
        return next(self._forward) if recv_prev else None, next(self._backward) if recv_next else None


def run_schedule(
    model: torch.nn.Module,
    config: Any,
    groups: ProcessGroupCollection,
    micro_batches: list[MicroBatch],
    loss: LossFunction,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run megatron-core's own schedule over packed micro-batches: 1F1B through the stages, or plain accumulation.

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

    arguments: dict[str, Any] = dict(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=groups,
    )
    # Sums over replicas begin in the last backward pass; a bare model has none.
    config.no_sync_func = getattr(model, "no_sync", None)
    kept: list[Any]
    if groups.pp.size() == 1:
        kept = forward_backward_no_pipelining(**arguments)
    else:
        sender = _Neighbors(groups.pp, config, [len(each.tokens) for each in micro_batches])
        kept = forward_backward_pipelining_without_interleaving(**arguments, p2p_communicator=sender)
    return [each for each in kept if each is not _BLANK]


@torch.no_grad()
def forward_only(
    model: Transformer, groups: ProcessGroupCollection, micro_batches: list[MicroBatch], compute: Callable[..., Any]
) -> list[Any]:
    """Run forward passes without gradients; keep what ``compute(output, micro_batch)`` returns, on the last stage.

    Collective: tp, pp.
    """
    micro_batches = equally_many(model, groups, micro_batches)
    if not micro_batches:
        return []

    def loss(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Any]:
        return output.new_zeros(()), compute(output, micro_batch)

    count_work(model, micro_batches, groups.tp.size() * groups.pp.size())
    return run_schedule(model, model.config, groups, micro_batches, loss, forward_only=True)


def equally_many(
    model: Transformer, groups: ProcessGroupCollection, micro_batches: list[MicroBatch]
) -> list[MicroBatch]:
    """Add blank micro-batches, so that all replicas that share a set of experts have equally many.

    Collective: ep.
    """
    config = model.config
    is_apart = config.expert_model_parallel_size > 1 or groups.expt_tp.size() != groups.tp.size()
    if config.num_moe_experts is None or not is_apart or groups.tp_ep.size() == 1:
        return micro_batches
    device = next(model.parameters()).device
    most = torch.tensor(len(micro_batches), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=groups.tp_ep)
    return micro_batches + [blank(device)] * (int(most) - len(micro_batches))


def count_work(
    model: Transformer,
    micro_batches: list[MicroBatch],
    num_ranks: int,
    *,
    is_training: bool = False,
    is_frozen: bool = False,
) -> None:
    """Add this rank's share of what micro-batches take; a prompt that several samples share is computed once.

    Args:
        model: The model.
        micro_batches: Those of a replica.
        num_ranks: Ranks that share the work.
        is_training: Forward and backward, not forward alone.
        is_frozen: Some weights have no gradients.
    """
    if model.flops is None:
        return
    tokens = sum(len(each.tokens) for each in micro_batches)
    pairs, outputs = sum(each.num_pairs for each in micro_batches), sum(len(each.rows) for each in micro_batches)
    if is_training:
        flops = model.flops.training(tokens, pairs, outputs, is_frozen=is_frozen)
    else:
        flops = model.flops.forward(tokens, pairs, outputs)
    add_work(flops / num_ranks, sum(sum(each.lengths) for each in micro_batches) / num_ranks)


def sum_over(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return a function that sums a tensor over a group, in place. Collective: the group."""

    def add(value: Tensor) -> Tensor:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(value, group=group)
        return value

    return add

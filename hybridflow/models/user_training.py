"""A user's own module in training: gradients summed over its replicas, and AdamW in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.config.roles import OptimizerConfig
from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.training import LossFunction
from hybridflow.models.user_model import Uncut
from hybridflow.reshard.memory import HostOffload

_CLIP_EPS = 1e-6
"""As megatron-core has it, so that both clip alike."""


class UserTrainable:
    """One replica of a module in training, with what ``training.Trainable`` has.

    Optimizer state is not cut over the replicas, whatever ``optimizer.distributed`` says.

    Args:
        model: The module.
        output: What it gives for the rows of a micro-batch.
        group: Its replicas' ranks.
        settings: How it learns.

    Attributes:
        model: The module.
        is_distributed: Whether optimizer state is cut over the replicas: it is not.
    """

    is_distributed = False

    def __init__(
        self,
        model: Uncut,
        output: Callable[[MicroBatch], Tensor],
        group: dist.ProcessGroup,
        settings: OptimizerConfig,
    ) -> None:
        self.model = model
        self._output, self._group, self._clip = output, group, settings.clip_grad
        self._parameters = {name: each for name, each in model.module.named_parameters() if each.requires_grad}
        # fp32 parameters are stepped themselves, others by way of an fp32 copy.
        self._mains = {
            name: each if each.dtype == torch.float32 else nn.Parameter(each.detach().float())
            for name, each in self._parameters.items()
        }
        mains = list(self._mains.values())
        self._gradients = torch.zeros(sum(each.numel() for each in mains), device=mains[0].device)
        for main, part in zip(mains, self._gradients.split([each.numel() for each in mains]), strict=True):
            main.grad = part.view(main.shape)
        decayed = [main for name, main in self._mains.items() if _is_decayed(name, main)]
        others = [main for name, main in self._mains.items() if not _is_decayed(name, main)]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
        )
        for main in mains:
            # There from the start, so that a checkpoint and host memory have a place for it.
            self._optimizer.state[main] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(main),
                "exp_avg_sq": torch.zeros_like(main),
            }

    def accumulate(self, micro_batches: list[MicroBatch], loss: LossFunction) -> list[Any]:
        """Run forward and backward over this rank's micro-batches; gradients are summed over the replicas at the end.

        Collective: dp. A replica without samples passes no micro-batch and still takes part.

        Returns:
            What ``loss`` gave beside the loss for each micro-batch.
        """
        self._gradients.zero_()
        self.model.train()
        kept = []
        for micro_batch in micro_batches:
            share, found = loss(self._output(micro_batch), micro_batch)
            share.backward()
            self._take_gradients()
            kept.append(found)
        self.model.eval()
        if self._group.size() > 1:
            dist.all_reduce(self._gradients, group=self._group)
        return kept

    def _take_gradients(self) -> None:
        """Add those of parameters that are not fp32 to what is summed in fp32."""
        for name, parameter in self._parameters.items():
            main = self._mains[name]
            if main is not parameter and parameter.grad is not None:
                assert main.grad is not None, "set from the start"
                main.grad.add_(parameter.grad)
                parameter.grad = None

    def step(self, *, is_followed: bool = False) -> float:
        """Clip the gradients, update the weights, and return the gradient norm before clipping.

        Each replica steps all weights, so that none are gathered.
        """
        norm = float(self._gradients.norm())
        if self._clip > 0 and norm > self._clip:
            self._gradients.mul_(self._clip / (norm + _CLIP_EPS))
        self._optimizer.step()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._mains[name] is not parameter:
                    parameter.copy_(self._mains[name])
        return norm

    @torch.no_grad()
    def reload_weights(self) -> None:
        """Take up weights that were written from outside."""
        for name, parameter in self._parameters.items():
            if self._mains[name] is not parameter:
                self._mains[name].copy_(parameter)

    def set_learning_rate(self, lr: float) -> None:
        """Use another learning rate from the next step on."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def learning_rate(self) -> float:
        """Return the rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return what each parameter's step needs: kind -> name -> flat live storage, as in ``training.Trainable``."""
        moments = {name: self._optimizer.state[main] for name, main in self._mains.items()}
        copied = {name: main for name, main in self._mains.items() if main is not self._parameters[name]}
        return {
            "exp_avg": {name: each["exp_avg"].view(-1) for name, each in moments.items()},
            "exp_avg_sq": {name: each["exp_avg_sq"].view(-1) for name, each in moments.items()},
            "master": {name: main.detach().view(-1) for name, main in copied.items()},
            "gradient": {name: _gradient(main).view(-1) for name, main in self._mains.items()},
        }

    def state_ranges(self) -> dict[str, tuple[int, int]]:
        """Name -> the elements of which ``state`` keeps something: all."""
        return {name: (0, main.numel()) for name, main in self._mains.items()}

    def num_steps(self) -> int:
        """Return the optimizer steps so far."""
        return int(next(iter(self._optimizer.state.values()))["step"])

    def set_num_steps(self, steps: int) -> None:
        """Go on as after so many optimizer steps."""
        for each in self._optimizer.state.values():
            each["step"].fill_(steps)

    def offload(self, owner: str) -> HostOffload:
        """Return what moves the optimizer's state to host memory and back; the gradients come back as zeros.

        Args:
            owner: Name of the owner, in errors.
        """
        state = self.state()
        kept = [each for kind in ("exp_avg", "exp_avg_sq", "master") for each in state[kind].values()]
        return HostOffload(kept, zeroed=[self._gradients], owner=owner)

    def reset_optimizer(self) -> None:
        """Forget all moments and the step count, and keep the weights."""
        state = self.state()
        for kind in ("exp_avg", "exp_avg_sq"):
            for tensor in state[kind].values():
                tensor.zero_()
        self.set_num_steps(0)


def _is_decayed(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies, as in megatron-core: neither to biases nor to norms."""
    return parameter.dim() > 1 and not name.endswith(".bias")


def _gradient(main: nn.Parameter) -> Tensor:
    assert main.grad is not None, "set from the start"
    return main.grad

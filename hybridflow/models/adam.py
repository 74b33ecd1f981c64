"""AdamW in fp32 over the tensors that this rank steps, whoever computes their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hybridflow.config.roles import OptimizerConfig
from hybridflow.models.training import finite, forget_moments
from hybridflow.reshard.memory import HostOffload

_CLIP_EPS = 1e-6
"""As megatron-core has it, so that both clip alike."""


class Adam:
    """The optimizer of a model that megatron-core does not train, with what ``training.Trainable`` has.

    Args:
        parameters: The model's by name, live; those that require no gradient are left out.
        settings: How it learns.
        part: Gives this rank's part, live, of a parameter or its gradient.
    """

    is_distributed = False

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        settings: OptimizerConfig,
        part: Callable[[Tensor], Tensor] = lambda each: each,
    ) -> None:
        self._clip = settings.clip_grad
        self._part = part
        self._parameters = {name: each for name, each in parameters.items() if each.requires_grad}
        self._held = {name: part(each) for name, each in self._parameters.items()}
        # fp32 parameters are stepped themselves, others by way of an fp32 copy.
        self._mains = {name: nn.Parameter(each.detach().float()) for name, each in self._held.items()}
        mains = list(self._mains.values())
        self._gradients = torch.zeros(sum(each.numel() for each in mains), device=mains[0].device)
        for main, own in zip(mains, self._gradients.split([each.numel() for each in mains]), strict=True):
            main.grad = own.view(main.shape)
        pulled = [main for name, main in self._mains.items() if _is_decayed(name, main)]
        others = [main for name, main in self._mains.items() if not _is_decayed(name, main)]
        groups = [{"params": pulled, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            # Else all state is gone over once for each operation.
            fused=True,
        )
        for main in mains:
            # There from the start, so that a checkpoint and host memory have a place for it.
            self._optimizer.state[main] = {
                "step": torch.tensor(0.0, device=main.device),
                "exp_avg": torch.zeros_like(main),
                "exp_avg_sq": torch.zeros_like(main),
            }

    def take_gradients(self) -> None:
        """Add what a backward pass has left to what ``step`` uses, which is in fp32."""
        for name, each in self._parameters.items():
            if each.grad is not None:
                _gradient(self._mains[name]).add_(self._part(each.grad))
                each.grad = None

    def step(self, *, is_followed: bool = False) -> float:
        """Clip the gradients, update the weights, and return the gradient norm before clipping."""
        norm = finite(self._norm(), self.learning_rate())
        if self._clip > 0 and norm > self._clip:
            self._gradients.mul_(self._clip / (norm + _CLIP_EPS))
        self._optimizer.step()
        with torch.no_grad():
            for name, held in self._copied():
                held.copy_(self._mains[name])
        return norm

    def _norm(self) -> float:
        """Return the norm of the gradients."""
        return float(self._gradients.norm())

    @torch.no_grad()
    def reload_weights(self) -> None:
        """Take up weights that were written from outside."""
        for name, held in self._copied():
            self._mains[name].copy_(held)

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
        return {
            "exp_avg": {name: each["exp_avg"].view(-1) for name, each in moments.items()},
            "exp_avg_sq": {name: each["exp_avg_sq"].view(-1) for name, each in moments.items()},
            "master": {name: self._mains[name].detach().view(-1) for name, _ in self._copied()},
            "gradient": {name: _gradient(main).view(-1) for name, main in self._mains.items()},
        }

    def state_ranges(self) -> dict[str, tuple[int, int]]:
        """Name -> the elements of this rank's part of which ``state`` keeps something: all."""
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
        forget_moments(self.state())
        self.set_num_steps(0)

    def _copied(self) -> list[tuple[str, Tensor]]:
        """Return the parameters that are stepped by way of an fp32 copy."""
        return [(name, held) for name, held in self._held.items() if held.dtype != torch.float32]


def _is_decayed(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies, as in megatron-core: neither to biases nor to norms."""
    return parameter.dim() > 1 and not name.endswith(".bias")


def _gradient(main: nn.Parameter) -> Tensor:
    assert main.grad is not None, "set from the start"
    return main.grad

"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from hybridflow.families.model import ModelConfig
from hybridflow.models.routing import Routing


class ExpertRouter(TopKRouter):
    """megatron-core's router, choosing by the settings of ours, and telling experts by number instead of by mask.

    Args:
        config: megatron-core's.
        groups: This rank's process groups.
        model: Settings of the model.
        layer: Index of its layer in the whole model.
        device: Where the weights live.

    Attributes:
        model: Settings of the model.
        layer: Index of its layer in the whole model.
        routing: What is to be known of the present micro-batch; None: nothing.
        expert_bias: Added to the scores when experts are chosen, ``[experts]`` fp32; None: nothing is added.
    """

    expert_bias: Tensor | None
    routing: Routing | None

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        model: ModelConfig,
        layer: int,
        device: torch.device,
    ) -> None:
        super().__init__(config=config, pg_collection=groups)
        self.layer = layer
        self.routing = None
        self.model = model
        if model.expert_norms:
            self.scale = nn.Parameter(torch.empty(config.hidden_size, device=device))
            self.expert_scale = nn.Parameter(torch.empty(config.num_moe_experts, device=device))
        if model.router_bias:
            # megatron-core registers it as None, or on the GPU wherever the model is.
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts, device=device))

    @property
    def is_softmax(self) -> bool:
        """Return whether experts are chosen by softmax alone."""
        return self.model.router_score == "softmax"

    def forward(self, hidden: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Choose experts for ``[tokens, 1, hidden]``.

        Args:
            hidden: All tokens of the micro-batch, or with sequence parallelism a slice of them.
            first: Number of the first of them in the micro-batch.

        Returns:
            Weights of the chosen experts, and their numbers in ascending order, ``[tokens, experts_per_token]`` each.
        """
        logits = self.gating(self.scaled(hidden))[:, 0]
        chosen = self.choose(self._scores(logits))
        if self.routing is None:
            return self._weights(logits, chosen), chosen
        chosen = self.routing.settle(self.layer, chosen, first)
        weights = self._weights(logits, chosen)
        return self.routing.observe(self.layer, logits, self._shares(logits), chosen, weights, first), chosen

    def scaled(self, hidden: Tensor) -> Tensor:
        """Return what the logits are a product of, ``[tokens, 1, hidden]``."""
        if not self.model.expert_norms:
            return hidden
        normed = rms_norm(hidden.float(), hidden.shape[-1:], eps=self.model.norm_eps).to(hidden.dtype)
        scaled: Tensor = normed * self.scale * hidden.shape[-1] ** -0.5
        return scaled

    def _shares(self, logits: Tensor) -> Tensor:
        """Return scores of the experts that add up to 1, ``[tokens, experts]`` fp32."""
        if self.is_softmax:
            return logits.softmax(-1, dtype=torch.float32)
        scores = logits.float().sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)

    def _scores(self, logits: Tensor) -> Tensor:
        """Return what experts are chosen by, ``[tokens, experts]`` fp32."""
        if self.is_softmax:
            # The order of the logits is that of their shares.
            return logits.detach().float()
        scores = logits.detach().float().sigmoid()
        return scores if self.expert_bias is None else scores + self.expert_bias

    def choose(self, scores: Tensor) -> Tensor:
        """Return the experts with the highest ``[tokens, experts]`` scores, in ascending order.

        They are ``[tokens, experts_per_token]`` int64.
        """
        groups, most = self.model.router_groups, self.model.router_groups_per_token
        if groups is not None and most is not None:
            grouped = scores.unflatten(1, (groups, -1))
            best = grouped.topk(2).values.sum(-1).topk(most, dim=1).indices
            is_out = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter(1, best, False)
            scores = grouped.masked_fill(is_out[:, :, None], -torch.inf).flatten(1)
        return scores.topk(self.topk, dim=1).indices.sort(dim=1).values

    def _weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights of the chosen experts, ``[tokens, experts_per_token]``."""
        model = self.model
        if self.is_softmax:
            if model.normalized_experts:
                weights = logits.gather(1, chosen).softmax(-1, dtype=torch.float32)
            else:
                weights = logits.softmax(-1, dtype=torch.float32).gather(1, chosen)
        else:
            weights = logits.float().sigmoid().gather(1, chosen)
            if model.normalized_experts:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if model.expert_norms:
            weights = weights * self.expert_scale[chosen]
        return (weights * model.routed_scaling).type_as(logits)

"""How many floating-point operations a model needs. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hybridflow.families.model import ModelConfig

BACKWARD = 2
"""Of each product of matrices the backward pass has two: for the gradient of the weights, and for that of the input."""


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Operations of a forward pass, a multiplication and an addition counting as two.

    What is no product of matrices (norms, activations, softmax) is left out, as is usual (arXiv 2204.02311).

    Attributes:
        per_token: In the layers, but for the two products of attention scores.
        per_pair: In these, of a token and one that it sees, itself included; of all layers. A window is not taken off.
        per_output: For the logits of a token, or its value.
    """

    per_token: int
    per_pair: int
    per_output: int

    def forward(self, tokens: float, pairs: float, outputs: float) -> float:
        """Return the operations for so many tokens, token pairs, and tokens whose logits or values are wanted."""
        return self.per_token * tokens + self.per_pair * pairs + self.per_output * outputs

    def training(self, tokens: float, pairs: float, outputs: float, *, is_frozen: bool = False) -> float:
        """Return the operations with the backward pass. Adapters and gradients of weights below them do not count."""
        products = 1 + BACKWARD - is_frozen
        matrices = self.per_token * tokens + self.per_output * outputs
        return products * matrices + (1 + BACKWARD) * self.per_pair * pairs


def model_flops(model: ModelConfig, *, vocab_size: int, has_value_head: bool = False) -> ModelFlops:
    """Return the operations of a recipe's model, whatever its layout.

    Args:
        model: Its shape. With fewer ``num_layers`` than it has, its first layers.
        vocab_size: True vocabulary, before padding.
        has_value_head: Values instead of logits.
    """
    hidden, layers = model.hidden_size, model.num_layers
    feed_forward = 3 * hidden * model.ffn_hidden_size
    if model.num_experts is not None:
        feed_forward = model.experts_per_token * feed_forward + hidden * model.num_experts
        feed_forward += 3 * hidden * (model.shared_ffn_hidden_size or 0)
        feed_forward += hidden * model.shared_expert_gate
    dense = 3 * hidden * (model.dense_ffn_hidden_size or 0)
    num_dense = min(model.num_dense_layers, layers)
    feed_forward = (layers - num_dense) * feed_forward + num_dense * dense
    linear = sum(layer < layers for layer in model.linear_layers)
    kinds = Counter(model.of_layer(layer) for layer in range(layers) if layer not in model.linear_layers)
    attention = sum(count * _attention_weights(kind) for kind, count in kinds.items()) + linear * _linear_products(
        model
    )
    heads = sum(count * (kind.head_size + kind.value_size) for kind, count in kinds.items())
    return ModelFlops(
        per_token=2 * (attention + feed_forward),
        per_pair=2 * model.num_attention_heads * heads,
        per_output=2 * hidden * (1 if has_value_head else vocab_size),
    )


def _linear_products(model: ModelConfig) -> int:
    """Return the multiplications for a token in a layer with linear attention.

    The state of a head is multiplied by a key, gets a product of key and value, and is multiplied by a query. In chunks
    that takes more.
    """
    weights = model.hidden_size * (model.linear_rows + model.linear_values)
    return weights + 3 * model.linear_values * (model.linear_key_head_dim or 0)


def _attention_weights(model: ModelConfig) -> int:
    """Return the numbers in the matrices of a layer's attention."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    queries, output = heads * model.head_size, heads * model.value_size * hidden
    if model.kv_lora_rank is None:
        return hidden * (model.query_rows + model.key_value_rows) + output
    of_queries = hidden * queries if model.q_lora_rank is None else model.q_lora_rank * (hidden + queries)
    up = heads * (model.head_size - model.rotary_size + model.value_size)
    return of_queries + hidden * (model.kv_lora_rank + model.rotary_size) + model.kv_lora_rank * up + output


def sequence_pairs(length: int, begun: int = 0) -> int:
    """Return the pairs of a token and one that it sees, in ``length`` tokens, without those of the first ``begun``."""
    return (length * (length + 1) - begun * (begun + 1)) // 2


def sampling_flops(model: ModelFlops, samples: Iterable[tuple[int, int, int]]) -> float:
    """Return the operations of sampling responses with a cache: a prompt is computed once for all of its samples.

    Args:
        model: Operations of the sampler.
        samples: For each sample its prompt index, and the tokens of its prompt and of its response.
    """
    prompts: dict[int, int] = {}
    flops = 0.0
    for prompt_index, prompt, response in samples:
        prompts[prompt_index] = prompt
        # The last token is sampled, and goes through the model no more.
        length = prompt + max(response - 1, 0)
        flops += model.forward(length - prompt, sequence_pairs(length, prompt), response)
    return flops + sum(model.forward(prompt, sequence_pairs(prompt), 0) for prompt in prompts.values())

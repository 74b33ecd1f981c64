"""Small classes as a user would write them: a language model, a critic, and a reward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from hybridflow.models.user_model import ActorModel, CriticModel, RewardModel


class Block(nn.Module):
    """A layer as Llama has it, but for grouped queries."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.other_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden: Tensor, angles: Tensor) -> Tensor:
        samples, tokens, width = hidden.shape
        parts = self.qkv(self.norm(hidden)).view(samples, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = turned(query, angles), turned(key, angles)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(samples, tokens, width))
        inner = self.other_norm(hidden)
        return hidden + self.down(silu(self.gate(inner)) * self.up(inner))


def turned(each: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions."""
    first, second = each.chunk(2, -1)
    cos, sin = angles[: each.shape[2]].cos(), angles[: each.shape[2]].sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Trunk(nn.Module):
    """What actor and critic share: hidden states of tokens."""

    def __init__(self, vocab_size: int, width: int, layers: int, heads: int, max_context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        turns = 100.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        self.register_buffer("angles", torch.outer(torch.arange(max_context), turns), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden, self.angles)
        return self.norm(hidden)


class TinyActor(ActorModel):
    """A language model of one's own."""

    def __init__(
        self,
        vocab_size: int = 29,
        width: int = 32,
        layers: int = 2,
        heads: int = 4,
        max_context: int = 48,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocab_size, self.max_context = vocab_size, max_context
        self.trunk = Trunk(vocab_size, width, layers, heads, max_context)
        self.head = nn.Linear(width, vocab_size, bias=False)
        fill(self, seed)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.trunk(input_ids))


class TinyCritic(CriticModel):
    """A value model of one's own."""

    def __init__(self, vocab_size: int = 29, width: int = 16, max_context: int = 48, seed: int = 1) -> None:
        super().__init__()
        self.vocab_size, self.max_context = vocab_size, max_context
        self.trunk = Trunk(vocab_size, width, 1, 2, max_context)
        self.head = nn.Linear(width, 1)
        fill(self, seed)

    def values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.trunk(input_ids))[:, :, 0] * attention_mask


class SamplingActor(TinyActor):
    """One with a ``generate`` of its own, which also tells log-probabilities."""

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        max_new_tokens: int,
        do_sample: bool,
        temperature: float,
        top_k: int,
        top_p: float,
        eos_token_id: list[int],
        pad_token_id: int,
    ) -> tuple[Tensor, Tensor]:
        lengths = attention_mask.sum(1)
        rows = range(len(input_ids))
        known = [input_ids[row, input_ids.shape[1] - int(lengths[row]) :] for row in rows]
        new = torch.full((len(input_ids), max_new_tokens), pad_token_id)
        told = torch.zeros(new.shape)
        for row in rows:
            for at in range(max_new_tokens):
                logits = self(known[row][None])[0, -1]
                chosen = (
                    torch.multinomial((logits / temperature).softmax(-1), 1) if do_sample else logits.argmax()[None]
                )
                told[row, at] = (logits / temperature).log_softmax(-1)[chosen[0]]
                new[row, at] = chosen[0]
                known[row] = torch.cat([known[row], chosen])
                if int(chosen) in eos_token_id:
                    break
        return torch.cat([input_ids, new], 1), told


class Digits(RewardModel):
    """The share of the answer's characters that the response has in place."""

    def scores(self, prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
        return [
            sum(one == other for one, other in zip(response, answer, strict=False)) / max(len(answer), 1)
            for response, answer in zip(responses, answers, strict=True)
        ]


def fill(module: nn.Module, seed: int, std: float = 0.3) -> None:
    """Weights of a seed: matrices normal, norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

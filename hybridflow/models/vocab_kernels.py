"""Triton kernels of ``models.log_probs``: two reads of the logits, and no copy of them in fp32."""

# torch reads the annotations of an operator, so they are no strings here.
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_COLUMNS = 4096
"""Columns that a program reads at a time."""


@triton.jit
def _terms_kernel(terms, logits, targets, first_id, num_real, stride, num_rows, temperature,
                  BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    local = tl.load(targets + row) - first_id
    largest = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, num_real, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_there = column < num_real
        value = tl.load(logits + row * stride + column, mask=is_there, other=-float("inf")).to(tl.float32)
        scaled = tl.div_rn(value, temperature)
        top = tl.maximum(largest, tl.max(scaled, 0))
        base = tl.where(top == -float("inf"), 0.0, top)
        share = tl.exp(scaled - base)
        factor = tl.exp(largest - base)
        total = total * factor + tl.sum(share, 0)
        # A logit of minus infinity has probability zero, and its product with it counts as zero.
        weighted = weighted * factor + tl.sum(share * tl.maximum(scaled, -1.0e30), 0)
        largest = top
    is_mine = (local >= 0) & (local < num_real)
    target = tl.load(logits + row * stride + local, mask=is_mine, other=0.0).to(tl.float32)
    tl.store(terms + row, largest)
    tl.store(terms + num_rows + row, total)
    tl.store(terms + 2 * num_rows + row, weighted)
    tl.store(terms + 3 * num_rows + row, tl.div_rn(target, temperature))


@triton.jit
def _gradient_kernel(grad, logits, targets, normalizers, entropies, grad_log_prob, grad_entropy, first_id, num_real,
                     width, stride, temperature, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = column < num_real
    value = tl.load(logits + row * stride + column, mask=is_real, other=-float("inf")).to(tl.float32)
    log_p = tl.div_rn(value, temperature) - tl.load(normalizers + row)
    p = tl.exp(log_p)
    log_p = tl.maximum(log_p, -1.0e30)
    of_log_prob, of_entropy = tl.load(grad_log_prob + row), tl.load(grad_entropy + row)
    # d log p_t / d z = 1[t] - p;  d H / d z = -p (log p + H).
    result = -p * (of_log_prob + of_entropy * (log_p + tl.load(entropies + row)))
    result += tl.where(column == tl.load(targets + row) - first_id, of_log_prob, 0.0)
    result = tl.where(is_real, result / temperature, 0.0)
    tl.store(grad + row * width + column, result.to(grad.dtype.element_ty), mask=column < width)


@torch.library.custom_op("hybridflow::vocab_terms", mutates_args=())
def vocab_terms(logits: Tensor, targets: Tensor, first_id: int, num_real: int, temperature: float) -> Tensor:
    """Sum up this rank's columns of ``softmax(logits / temperature)``.

    Args:
        logits: This rank's columns, ``[tokens, columns]``, rows one after the other.
        targets: Token ids, ``[tokens]`` int64.
        first_id: Id of the first column.
        num_real: Columns that are no padding.
        temperature: Divides the logits.

    Returns:
        ``[4, tokens]`` fp32: the largest scaled logit m, the sum of exp(z - m), the sum of exp(z - m) z, and the
        target's z, 0 where another rank has it.
    """
    terms = logits.new_empty(4, len(logits), dtype=torch.float32)
    if len(logits):
        _terms_kernel[(len(logits),)](
            *(terms, logits, targets, first_id, num_real, logits.stride(0), len(logits), float(temperature)),
            BLOCK=BLOCK_COLUMNS,
            num_warps=8,
        )
    return terms


@vocab_terms.register_fake
def _(logits: Tensor, targets: Tensor, first_id: int, num_real: int, temperature: float) -> Tensor:
    return logits.new_empty(4, len(logits), dtype=torch.float32)


@torch.library.custom_op("hybridflow::vocab_gradient", mutates_args=())
def vocab_gradient(
    logits: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    entropies: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor,
    first_id: int,
    num_real: int,
    temperature: float,
) -> Tensor:
    """Return the gradient of this rank's columns, ``[tokens, columns]`` in their format.

    Args:
        logits: As for ``vocab_terms``.
        targets: As for ``vocab_terms``.
        normalizers: Logarithm of each row's sum of exponentials over all ranks, ``[tokens]`` fp32.
        entropies: ``[tokens]`` fp32.
        grad_log_prob: Gradient of each log-probability, ``[tokens]`` fp32.
        grad_entropy: Gradient of each entropy, ``[tokens]`` fp32.
        first_id: As for ``vocab_terms``.
        num_real: As for ``vocab_terms``.
        temperature: As for ``vocab_terms``.
    """
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if len(logits):
        _gradient_kernel[(len(logits), triton.cdiv(logits.shape[1], BLOCK_COLUMNS))](
            *(grad, logits, targets, normalizers, entropies, grad_log_prob, grad_entropy),
            *(first_id, num_real, logits.shape[1], logits.stride(0), float(temperature)),
            BLOCK=BLOCK_COLUMNS,
            num_warps=8,
        )
    return grad


@vocab_gradient.register_fake
def _(logits: Tensor, *_: object) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)

"""Backward passes on the fake machine: torch's own engine asks for a device that is there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


@torch.no_grad()
def go_back(output: Tensor) -> dict[int, Tensor]:
    """Go back from a number through its graph, node by node; return ``id`` of a parameter -> its gradient.

    A gradient that is on another device than what it is the gradient of raises, and so does a question to the device.
    """
    given: dict[Any, dict[int, Tensor]] = defaultdict(dict, {output.grad_fn: {0: torch.ones_like(output)}})
    missing, found = _edges(output.grad_fn), {}
    ready = [output.grad_fn]
    while ready:
        node = ready.pop()
        gradients = _fitted(node, given.pop(node, {}))
        if hasattr(node, "variable"):
            found[id(node.variable)] = gradients[0]
            continue
        for after, place, gradient in _backward(node, gradients):
            if gradient is not None:
                sums = given[after]
                sums[place] = sums[place] + gradient if place in sums else gradient
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    return found


def _edges(root: Any) -> Counter[Any]:
    """Return how many edges lead to each node behind a node."""
    edges, seen, waiting = Counter[Any](), {root}, [root]
    while waiting:
        for after, _ in waiting.pop().next_functions:
            if after is not None:
                edges[after] += 1
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
    return edges


def _fitted(node: Any, given: dict[int, Tensor]) -> list[Tensor | None]:
    """Return a node's gradients in format and shape of its outputs, as torch's engine gives them."""
    fitted: list[Tensor | None] = []
    for place, output in enumerate(node._input_metadata):
        gradient = given.get(place)
        if gradient is not None:
            assert gradient.device == output.device, f"{node}: a gradient on {gradient.device}, not on {output.device}"
            gradient = gradient.sum_to_size(tuple(output.shape)).to(output.dtype)
        fitted.append(gradient)
    return fitted


def _backward(node: Any, gradients: list[Tensor | None]) -> Iterator[tuple[Any, int, Tensor | None]]:
    """Yield the nodes behind a node, which output of each, and the gradient of that."""
    behind = [(place, *each) for place, each in enumerate(node.next_functions) if each[0] is not None]
    if all(each is None for each in gradients):
        yield from ((after, output, None) for _, after, output in behind)
    elif isinstance(node, BackwardCFunction):
        pairs = zip(gradients, node._input_metadata, strict=True)
        found = node.apply(*(_zeros(output) if each is None else each for each, output in pairs))
        found = found if isinstance(found, tuple) else (found,)
        # Of arguments that are no tensors there are no nodes. Nothing may follow the gradients of all.
        needed = [each for each, is_needed in zip(found, node.needs_input_grad, strict=False) if is_needed]
        yield from ((*each[1:], gradient) for each, gradient in zip(behind, needed, strict=True))
    else:
        found = node(*gradients)
        found = found if isinstance(found, tuple) else (found,)
        yield from ((after, output, found[place]) for place, after, output in behind)


def _zeros(output: Any) -> Tensor:
    return torch.zeros(tuple(output.shape), dtype=output.dtype, device=output.device)

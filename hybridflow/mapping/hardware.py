"""Hardware that times are estimated for: a table that a person can read and extend. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridflow.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of GPU in nodes of eight: what it can do by its maker's figures, and the share that is reached.

    Attributes:
        flops: Dense bf16 products, floating-point operations a second.
        memory_bytes: Memory of a GPU.
        memory_bandwidth: Of that memory, bytes a second.
        node_bandwidth: Of a GPU to others of its node in each direction, bytes a second.
        network_bandwidth: Of a GPU to other nodes in each direction, bytes a second.
        host_bandwidth: Of a GPU to the memory of its host in each direction, bytes a second.
        node_latency: Of a collective within a node, seconds.
        network_latency: Of a collective across nodes, seconds.
        launch: What a layer adds to a step of decoding beside its bytes: kernels that are too small to fill a GPU,
            seconds.
        product_share: Share of ``flops`` that very large products reach.
        half_size: Size of each dim of a product at which that share is halved.
        attention_share: Share of ``flops`` that training's attention reaches.
        memory_share: Share of ``memory_bandwidth`` at which weights are read in decoding.
        elementwise_share: Share of ``memory_bandwidth`` that norms, activations and the loss reach.
        cache_share: Share of ``memory_bandwidth`` at which decoding reads keys and values.
        node_share: Share of ``node_bandwidth`` that collectives reach.
        network_share: Share of ``network_bandwidth`` that they reach.
        host_share: Share of ``host_bandwidth`` that copies reach; compared with nothing.
    """

    flops: float
    memory_bytes: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    node_latency: float = 8e-6
    network_latency: float = 20e-6
    launch: float
    product_share: float
    half_size: float
    attention_share: float
    memory_share: float = 0.8
    elementwise_share: float = 0.3
    cache_share: float
    node_share: float = 0.78
    network_share: float = 0.9
    host_share: float = 0.8


RANKS_PER_NODE = 8

_H100 = Hardware(
    flops=989.4e12,
    memory_bytes=80e9,
    memory_bandwidth=3.35e12,
    node_bandwidth=450e9,
    network_bandwidth=50e9,
    host_bandwidth=64e9,
    launch=30e-6,
    product_share=0.82,
    half_size=350,
    attention_share=0.3,
    cache_share=0.5,
)

_TABLE = {
    "h100-sxm": _H100,
    "h200": replace(_H100, memory_bytes=141e9, memory_bandwidth=4.8e12),
    "b200": replace(_H100, flops=2250e12, memory_bytes=180e9, memory_bandwidth=8e12, node_bandwidth=900e9),
    "a100-80g": Hardware(
        flops=312e12,
        memory_bytes=80e9,
        memory_bandwidth=2.04e12,
        node_bandwidth=300e9,
        network_bandwidth=25e9,
        host_bandwidth=32e9,
        launch=40e-6,
        product_share=0.8,
        half_size=350,
        attention_share=0.1,
        cache_share=0.5,
    ),
}


def hardware(name: str) -> Hardware:
    """Return one kind of hardware.

    Raises:
        ConfigError: None of that name is known.
    """
    if name not in _TABLE:
        raise ConfigError(f"--hardware {name}: not one of {', '.join(_TABLE)}")
    return _TABLE[name]


def hardware_names() -> tuple[str, ...]:
    """Return the names that are known."""
    return tuple(_TABLE)

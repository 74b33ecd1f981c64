"""Hardware that times are estimated for: a table that a person can read and extend. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from hybridflow.errors import ConfigError
from hybridflow.sections import Bounds, Count, NotNegative, Positive, read_section, read_yaml

MEASURED, MEASURED_FILE = "measured", Path("~/.config/hybridflow/measured.yaml")
"""The name of the hardware that ``hybridflow doctor --measure`` has measured, and where it writes it."""

DEFAULT_HARDWARE = "h100-sxm"
"""For plans that name none."""

_Share = Annotated[float, Bounds(low=0, high=1, above=True)]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of GPU, or of core, and the node it is in: what it can do, and the share that is reached.

    Attributes:
        dtype: Of the models for which the figures hold.
        ranks_per_node: Ranks of a node that is full.
        crowding: Ranks of a full node for each that computes at full speed at once; above 1 where ranks share cores.
            The figures are for a rank of a full node, all of whose ranks compute.
        flops: Dense products in that dtype, floating-point operations a second.
        fp8_flops: Dense products in FP8; 0: there are none.
        memory_bytes: Memory of a GPU, or a rank's part of the node's.
        memory_bandwidth: Of that memory, bytes a second.
        node_bandwidth: Of a GPU to others of its node in each direction, bytes a second.
        network_bandwidth: Of a GPU to other nodes in each direction, bytes a second. 0: not known; one node only.
        host_bandwidth: Of a GPU to the memory of its host in each direction, bytes a second.
        node_latency: Of a collective within a node, seconds; where ranks share cores, for each rank of the group.
        network_latency: Of a collective across nodes, seconds.
        launch: What a layer adds to a step of decoding beside its bytes: kernels that are too small to fill a GPU,
            seconds.
        cast_launch: What FP8 adds to that, seconds.
        pass_launch: What each layer adds to the forward pass of a micro-batch, and twice to the backward pass; 0 where
            kernels hide it, seconds.
        pass_host: What the host takes to start the kernels of a layer's forward pass; backward it takes twice that. A
            layer takes at least as long. 0 where it is not known, and on CPUs, seconds.
        route_launch: What a layer of experts adds to that: tokens are counted and sorted, and the host waits for the
            counts, seconds.
        update_launch: What each layer adds to an optimizer step, seconds.
        engine_launch: What each token of a rollout adds on the host: scheduling, sampling, texts, seconds. Decoding in
            ``plan estimate --phase generate`` is without it.
        product_share: Share of ``flops`` that very large products reach.
        fp8_share: Share of ``fp8_flops`` that very large products reach.
        half_size: Size of each dim of a product at which that share is halved.
        attention_share: Share of ``flops`` that training's attention reaches.
        memory_share: Share of ``memory_bandwidth`` at which weights are read in decoding.
        elementwise_share: Share of ``memory_bandwidth`` that norms, activations and the loss reach.
        cache_share: Share of ``memory_bandwidth`` at which decoding reads keys and values.
        prompt_share: Speed of products over prompts that are generated from, in that of pretraining's products; not in
            FP8.
        exposed_share: Share of tensor-parallel communication in training that computation does not hide.
        bare_share: Share of data-parallel communication that nothing hides.
        node_share: Share of ``node_bandwidth`` that collectives reach.
        network_share: Share of ``network_bandwidth`` that they reach.
        sample_share: Share of the speed of pretraining at which an RL step's updates, log-probabilities and values are
            computed: samples are long and short, and few for each optimizer step.
        mixture_share: Share of that where the model is a mixture: some experts get more tokens than others.
        host_share: Share of ``host_bandwidth`` that copies reach; compared with nothing.
        error_percent: Largest difference of an estimate from the measured times to which figures were fitted.
    """

    dtype: Literal["bf16", "fp32"] = "bf16"
    ranks_per_node: Count = 8
    crowding: Annotated[float, Bounds(low=1)] = 1.0
    flops: Positive
    fp8_flops: NotNegative = 0.0
    memory_bytes: Positive
    memory_bandwidth: Positive
    node_bandwidth: Positive
    network_bandwidth: NotNegative
    host_bandwidth: Positive
    node_latency: NotNegative = 8e-6
    network_latency: NotNegative = 20e-6
    launch: NotNegative
    cast_launch: NotNegative = 0.0
    pass_launch: NotNegative = 0.0
    pass_host: NotNegative = 0.0
    route_launch: NotNegative = 0.0
    update_launch: NotNegative = 0.0
    engine_launch: NotNegative = 0.0
    product_share: _Share
    fp8_share: _Share = 0.7
    half_size: NotNegative
    attention_share: _Share
    memory_share: _Share = 0.8
    elementwise_share: _Share = 0.3
    cache_share: _Share
    prompt_share: Positive = 1.0
    exposed_share: _Share = 1.0
    bare_share: _Share = 0.25
    node_share: _Share = 0.78
    network_share: _Share = 0.9
    sample_share: _Share = 1.0
    mixture_share: _Share = 1.0
    host_share: _Share = 0.8
    error_percent: NotNegative | None = None

    @property
    def is_cpu(self) -> bool:
        """Return whether ranks compute on the CPU: GPUs are described for bf16."""
        return self.dtype == "fp32"

    def share_of_time(self, num_ranks: int) -> float:
        """Return what a call takes on so many ranks while no others work, of what it takes while all do."""
        return max(min(1.0, num_ranks / self.ranks_per_node), 1 / self.crowding)

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a number of ranks that no nodes of this kind have, or of which times are not known.

        Raises:
            ConfigError: They are no whole nodes, or several nodes whose network is not described.
        """
        per_node = self.ranks_per_node
        if num_ranks > per_node and num_ranks % per_node:
            raise ConfigError(f"{num_ranks} ranks are no whole nodes of {per_node}; give whole nodes")
        if num_ranks > per_node and not self.network_bandwidth:
            raise ConfigError(
                f"{num_ranks} ranks need more than one node of {per_node}, and the hardware has no network_bandwidth; "
                "add it to the file, or take fewer ranks"
            )


_H100 = Hardware(
    flops=989.4e12,
    fp8_flops=1978.9e12,
    memory_bytes=80e9,
    memory_bandwidth=3.35e12,
    node_bandwidth=450e9,
    network_bandwidth=50e9,
    host_bandwidth=64e9,
    launch=35e-6,
    cast_launch=15e-6,
    pass_launch=200e-6,
    route_launch=1.5e-3,
    product_share=0.635,
    fp8_share=0.56,
    half_size=90,
    attention_share=0.36,
    elementwise_share=0.95,
    exposed_share=0.135,
    cache_share=0.9,
    prompt_share=1.22,
    engine_launch=7e-3,
    sample_share=0.75,
    mixture_share=0.7,
)

_A100 = Hardware(
    flops=312e12,
    memory_bytes=80e9,
    memory_bandwidth=2.04e12,
    node_bandwidth=300e9,
    network_bandwidth=25e9,
    host_bandwidth=32e9,
    launch=55e-6,
    pass_launch=200e-6,
    route_launch=1.5e-3,
    product_share=0.75,
    half_size=110,
    attention_share=0.12,
    elementwise_share=0.57,
    memory_share=0.88,
    cache_share=0.75,
    prompt_share=1.12,
    # As on an H100: no step of RL was compared on an A100.
    engine_launch=7e-3,
    sample_share=0.75,
    mixture_share=0.7,
)

_TABLE = {
    "h100-sxm": _H100,
    "h200": replace(_H100, memory_bytes=141e9, memory_bandwidth=4.8e12),
    "b200": replace(
        _H100,
        flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes=180e9,
        memory_bandwidth=8e12,
        node_bandwidth=900e9,
        product_share=0.45,
        fp8_share=0.55,
        half_size=85,
        attention_share=0.7,
        elementwise_share=1.0,
        exposed_share=1.0,
        node_share=0.31,
    ),
    # Attention wrote its scores to memory in the runs of 2022.
    "a100-80g": _A100,
    "a100-80g-fused": replace(_A100, attention_share=0.38),
    # One port of 200 Gb/s for the 8 GPUs of a node, as in arXiv 2409.19256, section 8, whose system, verl, leaves
    # overlap_grad_reduce off.
    "a100-80g-one-port": replace(_A100, network_bandwidth=25e9 / 8, bare_share=1.0),
}


def hardware(name: str) -> Hardware:
    """Return one kind of hardware: of the table, measured on this machine, or described in a file of the same keys.

    Raises:
        ConfigError: None of that name is known, or the file is wrong.
    """
    if name in _TABLE:
        return _TABLE[name]
    path = MEASURED_FILE.expanduser() if name == MEASURED else Path(name)
    if name == MEASURED and not path.exists():
        raise ConfigError(
            f"hardware {name}: {path} is missing; write it with `hybridflow doctor --measure` on a node of the job, or "
            f"name one of {', '.join(_TABLE)} (--hardware, cluster.hardware)"
        )
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"hardware {name}: expected one of {', '.join(hardware_names())}, or "
            "a file NAME.yaml (--hardware, cluster.hardware)"
        )
    try:
        return read_section(Hardware, read_yaml(path), source=str(path))
    except ConfigError as error:
        if name != MEASURED:
            raise
        raise ConfigError(f"{error}; write the file anew with `hybridflow doctor --measure`") from None


def hardware_names() -> tuple[str, ...]:
    """Return the names that are known."""
    return (*_TABLE, MEASURED)

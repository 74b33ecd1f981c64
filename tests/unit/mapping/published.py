"""Published training steps, decoding and memory of GPUs, with their sources, and what is estimated for them."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.estimate import (
    TrainStep,
    decode_seconds,
    prefill_seconds,
    train_bytes,
    train_seconds,
)
from hybridflow.mapping.hardware import hardware
from hybridflow.mapping.sizes import Size, model_size


def gpt(layers: int, hidden: int, heads: int, vocab: int, tied: bool = True) -> str:
    shape = f"layers={layers},hidden={hidden},heads={heads},ffn={4 * hidden},vocab={vocab}"
    return f"{shape},gated=false,tied={'true' if tied else 'false'}"


def llama(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int) -> str:
    return f"layers={layers},hidden={hidden},heads={heads},groups={groups},ffn={ffn},vocab={vocab}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A published training step.

    Attributes:
        group: Row of the table in docs/mapping.md.
        name: Model.
        fitted: Whether figures of the hardware were fitted to it.
        published: In ``unit``.
    """

    group: str
    name: str
    hardware: str
    model: str | Size
    layout: str
    sequence: int
    batch: int
    micro_batch: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    fp8: bool = False
    fitted: bool = False
    published: float
    unit: Literal["s", "tokens/s a GPU", "TFLOP/s", "TFLOP/s with recomputation"] = "s"

    @property
    def size(self) -> Size:
        """Return the sizes of the model."""
        return self.model if isinstance(self.model, Size) else model_size(self.model)

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        size, gpus = self.size, ParallelLayout.parse(self.layout).world_size
        tokens = self.batch * self.sequence
        if self.unit == "s":
            return self.published
        if self.unit == "tokens/s a GPU":
            return tokens / self.published / gpus
        flops = size.training_flops(tokens, self.sequence)
        if self.unit == "TFLOP/s with recomputation":
            # arXiv 2104.04473: 96 B s l h² (1 + s/6h + V/16lh).
            h, layers = size.model.hidden_size, size.model.num_layers
            flops = (
                96 * tokens * layers * h**2 * (1 + self.sequence / (6 * h) + size.model.vocab_size / (16 * layers * h))
            )
        return flops / self.published / gpus / 1e12

    def estimate(self) -> dict[str, float]:
        """Return the estimated seconds by part."""
        step = TrainStep(
            layout=ParallelLayout.parse(self.layout),
            sequence=self.sequence,
            batch=self.batch,
            micro_batch=self.micro_batch,
            recompute=self.recompute,
            fp8=self.fp8,
        )
        return train_seconds(self.size, hardware(self.hardware), step)

    @property
    def error(self) -> float:
        """Return by how much the estimate is off, in percent."""
        return 100 * (sum(self.estimate().values()) / self.seconds - 1)


def _megatron() -> list[Step]:
    """Megatron-LM's README, table of model sizes."""
    rows = ((24, 2048, 16, "dp48", 408.8), (30, 4096, 32, "tp2.dp48", 465.9), (32, 6144, 48, "tp4.dp48", 489.1))
    return [
        Step(
            group="H100, bf16",
            name=f"Megatron-LM, {hidden} × {layers}",
            hardware="h100-sxm",
            model=gpt(layers, hidden, heads, 131072),
            layout=layout,
            sequence=4096,
            batch=192,
            fitted=True,
            published=tflops,
            unit="TFLOP/s",
        )
        for layers, hidden, heads, layout, tflops in rows
    ]


_NEMOTRON_15B = "layers=32,hidden=6144,heads=48,groups=8,ffn=24576,vocab=256000,gated=false"
_NEMOTRON_340B = "layers=96,hidden=18432,heads=96,groups=8,head=192,ffn=73728,vocab=256000,gated=false"
_GPT_175B = gpt(96, 12288, 96, 51200)


def _dgx_cloud() -> list[Step]:
    """NVIDIA's dgxc-benchmarking, READMEs of GPT3 175B, Nemotron4 15B and 340B and Llama 3.1 70B and 405B.

    NeMo 24.09 and 24.11: seconds in bf16 and in FP8 on more and more GPUs.
    """
    rows = [
        *[("GPT3 175B", _GPT_175B, "tp4.pp8.vpp12.dp{}", 4, n, 2048, 256, 1, b, f) for n, b, f in
          ((1, 8.309, 5.626), (2, 8.408, 5.725), (4, 8.42, 5.774), (8, 8.453, 5.82), (16, 8.49, 5.96))],
        *[("Nemotron4 340B", _NEMOTRON_340B, "tp8.pp8.vpp12.dp{}", 2, n, 4096, 32, 1, b, f) for n, b, f in
          ((1, 4.61, 3.16), (2, 4.67, 3.21), (4, 4.7, 3.26), (8, 4.73, 3.34), (16, 4.84, 3.49))],
        *[("Nemotron4 15B", _NEMOTRON_15B, "tp4.dp{}", 4, n, 4096, 64, 4, b, f) for n, b, f in
          ((1, 2.812, 2.039), (4, 2.845, 2.048), (16, 2.852, 2.075), (128, 2.887, 2.12))],
        *[("Llama 3.1 70B", "llama3-70b", "tp4.pp4.vpp5.cp2.dp{}", 2, n, 8192, 128, 1, b, f) for n, b, f in
          ((1, 14.72, 11.01), (4, 14.8, 11.16), (8, 14.89, 11.18), (32, 14.98, 11.39))],
        *[("Llama 3.1 405B", "llama3-405b", "tp8.pp9.vpp7.cp2.dp{}", 4, n, 8192, 252, 1, b, f) for n, b, f in
          ((1, 17.2, 11.24), (2, 17.52, 11.31), (4, 17.62, 12.35))],
    ]  # fmt: skip
    fitted = {
        *(("GPT3 175B", 1, False), ("GPT3 175B", 16, False), ("GPT3 175B", 1, True)),
        *(("Nemotron4 15B", 4, False), ("Nemotron4 15B", 4, True)),
        *(("Llama 3.1 70B", 1, False), ("Llama 3.1 70B", 32, True)),
    }
    found = []
    for name, model, layout, dp, times, sequence, batch, micro_batch, *published in rows:
        for fp8, seconds in zip((False, True), published, strict=True):
            cut = layout.format(dp * times)
            found.append(
                Step(
                    group="H100, FP8" if fp8 else "H100, bf16",
                    name=f"{name} on {ParallelLayout.parse(cut).world_size}",
                    hardware="h100-sxm",
                    model=model,
                    layout=cut,
                    sequence=sequence,
                    batch=batch * times,
                    micro_batch=micro_batch,
                    fp8=fp8,
                    fitted=(name, times, fp8) in fitted,
                    published=seconds,
                )
            )
    return found


def _nemo() -> list[Step]:
    """NeMo's performance summary, container 24.12, and Megatron Bridge's, container 25.11. All in FP8."""
    nemotron = "layers={},hidden={},heads={},ffn={},vocab=256000,gated=false"
    rows = (
        ("GPT3 5B", gpt(24, 4096, 32, 51200), "dp64", 2048, 2048, 4, 23406),
        ("GPT3 20B", gpt(44, 6144, 48, 51200), "tp2.dp32", 2048, 256, 2, 5851),
        ("GPT3 175B", _GPT_175B, "tp4.pp8.vpp6.dp16", 2048, 2048, 2, 825),
        ("Llama 2 7B", llama(32, 4096, 32, 32, 11008, 32000), "dp8", 4096, 128, 1, 16934),
        ("Llama 2 13B", llama(40, 5120, 40, 40, 13824, 32000), "pp4.vpp10.dp4", 4096, 128, 1, 8715),
        ("Llama 2 70B", llama(80, 8192, 64, 8, 28672, 32000), "tp4.pp4.vpp20.dp4", 4096, 128, 1, 1728),
        ("Nemotron 8B", nemotron.format(32, 4096, 32, 16384), "tp2.dp32", 4096, 256, 4, 12507),
        ("Nemotron 22B", nemotron.format(40, 6144, 48, 24576), "tp2.pp4.vpp10.dp8", 4096, 256, 2, 4312),
        ("Llama 3 8B", "llama3-8b", "cp2.dp4", 8192, 128, 1, 12273),
        ("Llama 3 70B", "llama3-70b", "tp4.pp4.vpp5.cp2.dp2", 8192, 128, 1, 1524),
        ("Llama 3 70B, 25.11", "llama3-70b", "tp4.pp8.vpp5.dp2", 8192, 128, 1, 1602),
        ("Llama 3.1 405B, 25.11", "llama3-405b", "tp8.pp8.vpp8.cp2.dp8", 8192, 512, 1, 292),
        ("Llama 3 8B, B200", "llama3-8b", "dp8", 8192, 128, 2, 30624),
        ("Llama 3.1 405B, B200", "llama3-405b", "tp4.pp8.vpp8.cp2.dp2", 8192, 64, 1, 661),
    )
    return [
        Step(
            group="B200, FP8" if name.endswith("B200") else "H100, FP8",
            name=f"NeMo, {name}",
            hardware="b200" if name.endswith("B200") else "h100-sxm",
            model=model,
            layout=layout,
            sequence=sequence,
            batch=batch,
            micro_batch=micro_batch,
            fp8=True,
            fitted=name in ("Llama 2 7B", "Llama 2 13B"),
            published=tokens,
            unit="tokens/s a GPU",
        )
        for name, model, layout, sequence, batch, micro_batch, tokens in rows
    ]


def _a100() -> list[Step]:
    """arXiv 2205.05198, table 5 and section 6.3, and arXiv 2104.04473, table 1."""
    found = []
    rows = (
        ("22B", gpt(48, 6144, 64, 51200), "tp8", 4, 1.42, 1.10),
        ("175B", _GPT_175B, "tp8.pp8.vpp3", 64, 18.13, 13.75),
        ("530B", gpt(105, 20480, 128, 51200), "tp8.pp35.vpp3", 280, 49.05, 37.83),
        ("1T", gpt(128, 25600, 160, 51200), "tp8.pp64", 512, 94.42, 71.49),
        ("530B, dp8", gpt(105, 20480, 128, 51200), "tp8.pp35.vpp3.dp8", 2240, None, 39.15),
    )
    for name, model, layout, batch, *published in rows:
        for recompute, seconds in zip(("full", "selective"), published, strict=True):
            if seconds is not None:
                found.append(
                    Step(
                        group="A100, bf16, recomputation",
                        name=f"{name}, {recompute}",
                        hardware="a100-80g",
                        model=model,
                        layout=layout,
                        sequence=2048,
                        batch=batch,
                        recompute=recompute,
                        fitted=True,
                        published=seconds,
                    )
                )
    older = (
        (24, 2304, 24, "dp32", 512, 137),
        (32, 3072, 30, "tp2.dp32", 512, 138),
        (32, 4096, 36, "tp4.dp32", 512, 142),
        (48, 6144, 40, "tp8.dp32", 1024, 135),
        (64, 8192, 48, "tp8.pp2.dp32", 1536, 138),
        (80, 10240, 60, "tp8.pp4.dp32", 1792, 140),
        (96, 12288, 80, "tp8.pp8.dp24", 2304, 148),
        (128, 16384, 96, "tp8.pp16.dp15", 2160, 155),
        (128, 20480, 105, "tp8.pp35.dp9", 2520, 163),
        (160, 25600, 128, "tp8.pp64.dp6", 3072, 163),
    )
    for heads, hidden, layers, layout, batch, tflops in older:
        found.append(
            Step(
                group="A100, bf16, recomputation",
                name=f"2104.04473, {hidden} × {layers}",
                hardware="a100-80g",
                model=gpt(layers, hidden, heads, 51200),
                layout=layout,
                sequence=2048,
                batch=batch,
                recompute="full",
                published=tflops,
                unit="TFLOP/s with recomputation",
            )
        )
    return found


def _mosaic() -> list[Step]:
    """LLM Foundry's scripts/train/benchmarking: MPT with PyTorch FSDP and fused attention, tokens/s of each GPU."""
    seven, three, one = (32, 4096, 32), (32, 2560, 20), (24, 2048, 16)
    rows = (
        ("7B", seven, 2048, 6, "none", 48, 10643, 96, 4641),
        ("7B", seven, 4096, 16, "full", 256, 8611, 256, 3684),
        ("7B", seven, 8192, 8, "full", 128, 6935, 128, 3206),
        ("7B", seven, 32768, 2, "full", 32, 3318, 32, 1672),
        ("3B", three, 8192, 3, "none", 144, 16578, 144, 7695),
        ("1B", one, 2048, 14, "none", 112, 45455, 448, 20513),
        ("1B", one, 32768, 1, "none", 32, 12025, 32, 6275),
    )
    fitted = {("7B", 2048), ("7B", 8192), ("1B", 2048), ("3B", 8192)}
    found = []
    for name, sizes, sequence, micro_batch, recompute, *measured in rows:
        for machine, batch, tokens in (("h100-sxm", *measured[:2]), ("a100-80g-fused", *measured[2:])):
            found.append(
                Step(
                    group="A100, bf16, attention fused"
                    if machine != "h100-sxm"
                    else "H100, bf16, PyTorch FSDP of 2023",
                    name=f"MPT {name}, {sequence}",
                    hardware=machine,
                    model=gpt(*sizes, 50368),
                    layout="dp8",
                    sequence=sequence,
                    batch=batch,
                    micro_batch=micro_batch,
                    recompute=recompute,
                    fitted=machine != "h100-sxm" and (name, sequence) in fitted,
                    published=tokens,
                    unit="tokens/s a GPU",
                )
            )
    return found


_LLAMA_70B_PART = llama(12, 8192, 64, 8, 28672, 128256)
_LLAMA_405B_PART = llama(4, 16384, 128, 16, 53248, 128256)


def _simumax() -> list[Step]:
    """SimuMax's b200_release_v1.2_summary: Megatron-LM on one node of B200, some layers of a model, overlap turned off.
    The first and last of its three numbers of micro-batches."""
    rows = (
        ("70B", _LLAMA_70B_PART, "pp2.dp4", 0.843, 5.4365),
        ("70B", _LLAMA_70B_PART, "tp2.dp4", 0.7255, 5.3765),
        ("70B", _LLAMA_70B_PART, "tp4.dp2", 0.4098, 2.9646),
        ("70B", _LLAMA_70B_PART, "tp8", 0.2809, 2.0737),
        ("405B", _LLAMA_405B_PART, "pp2.dp4", 1.0746, 7.0464),
        ("405B", _LLAMA_405B_PART, "tp2.dp4", 0.9073, 6.6041),
        ("405B", _LLAMA_405B_PART, "tp4.dp2", 0.476, 3.4554),
        ("405B", _LLAMA_405B_PART, "tp8", 0.2588, 1.9018),
    )
    fitted = {("70B", "pp2.dp4", 32), ("70B", "tp4.dp2", 32), ("70B", "tp8", 4)}
    fitted |= {("405B", "pp2.dp4", 4), ("405B", "tp2.dp4", 32), ("405B", "tp8", 4)}
    return [
        Step(
            group="B200, bf16",
            name=f"SimuMax, {name}, {layout}, {number}",
            hardware="b200",
            model=model,
            layout=layout,
            sequence=4096,
            batch=number * ParallelLayout.parse(layout).dp,
            fitted=(name, layout, number) in fitted,
            published=seconds,
        )
        for name, model, layout, *measured in rows
        for number, seconds in zip((4, 32), measured, strict=True)
    ]


def _part_of_deepseek() -> Size:
    """Return DeepSeek-V3 with one dense layer and three of experts."""
    whole = model_size("deepseek-v3")
    return replace(whole, model=replace(whole.model, num_layers=4, num_dense_layers=1))


def _mixtures() -> list[Step]:
    """SimuMax's b200_release_v1.2_summary in bf16, and Megatron Bridge's summary, container 25.11, in FP8."""
    part = _part_of_deepseek()
    measured = (
        ("dp8.ep8.etp1", 32, 0.6032),
        ("dp8.ep8.etp1", 256, 4.1412),
        ("pp2.dp4.ep4.etp1", 16, 0.4522),
        ("pp2.dp4.ep4.etp1", 128, 2.7186),
    )
    found = [
        Step(
            group="B200, bf16, mixtures",
            name=f"SimuMax, DeepSeek-V3 of 4 layers, {layout}, {batch}",
            hardware="b200",
            model=part,
            layout=layout,
            sequence=4096,
            batch=batch,
            fitted=True,
            published=seconds,
        )
        for layout, batch, seconds in measured
    ]
    bridge = (
        ("h100-sxm", "qwen3-30b-a3b", "pp2.vpp24.dp8.ep8.etp1", 512, 2, 5275),
        ("b200", "qwen3-30b-a3b", "dp8.ep8.etp1", 512, 1, 9299),
        ("b200", "qwen3-235b-a22b", "pp8.vpp2.dp8.ep8.etp1", 1024, 1, 3269),
        ("b200", "deepseek-v3", "pp16.dp16.ep8.etp1", 2048, 1, 2139),
    )
    return found + [
        Step(
            group=f"{'B200' if machine == 'b200' else 'H100'}, FP8, mixtures",
            name=f"Megatron Bridge, {model}",
            hardware=machine,
            model=model,
            layout=layout,
            sequence=4096,
            batch=batch,
            micro_batch=micro_batch,
            fp8=True,
            published=tokens,
            unit="tokens/s a GPU",
        )
        for machine, model, layout, batch, micro_batch, tokens in bridge
    ]


STEPS = (*_megatron(), *_dgx_cloud(), *_nemo(), *_a100(), *_mosaic(), *_simumax(), *_mixtures())


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Published generation of a fixed batch, prompts read first.

    Attributes:
        tokens_per_s: Output of each GPU.
    """

    group: str
    name: str
    hardware: str
    model: str
    tp: int
    concurrent: int
    prompt: int
    response: int
    fp8: bool
    fitted: bool
    tokens_per_s: float

    @property
    def error(self) -> float:
        """Return by how much the estimated time is off, in percent."""
        size, machine, layout = model_size(self.model), hardware(self.hardware), ParallelLayout(tp=self.tp)
        together = max(1, min(self.concurrent, 2048 // self.prompt))
        reading = prefill_seconds(size, machine, layout, self.prompt, together, fp8=self.fp8)
        context = self.prompt + self.response / 2
        token = sum(decode_seconds(size, machine, layout, self.concurrent, context, fp8=self.fp8).values())
        seconds = self.concurrent / together * reading + (self.response - 1) * token
        return 100 * (seconds / (self.concurrent * self.response / self.tokens_per_s / self.tp) - 1)


_DECODED = {
    "GPT-J 6B": "layers=28,hidden=4096,heads=16,head=256,ffn=16384,vocab=50400,gated=false",
    "Mistral 7B": llama(32, 4096, 32, 8, 14336, 32000),
    "Mixtral 8x7B": "mixtral-8x7b",
    "LLaMA 7B": llama(32, 4096, 32, 32, 11008, 32000),
    "LLaMA 70B": llama(80, 8192, 64, 8, 28672, 32000),
    "Falcon 180B": "layers=80,hidden=14848,heads=232,groups=8,head=64,ffn=59392,vocab=65024,gated=false,tied=true",
}
_LENGTHS = ((128, 128), (128, 2048), (2048, 128), (2048, 2048))
# TensorRT-LLM 0.9, docs/source/performance.md, peak throughput: batch, tp and tokens/s a GPU for each of the lengths.
_TENSORRT = {
    "h100-sxm": {
        "GPT-J 6B": ((1024, 1, 25860), (120, 1, 7350), (64, 1, 2570), (64, 1, 3212)),
        "Mistral 7B": ((896, 1, 20404), (120, 1, 8623), (84, 1, 2405), (56, 1, 3731)),
        "Mixtral 8x7B": ((512, 2, 5255), (128, 2, 3408), (64, 2, 588), (32, 2, 1317)),
        "LLaMA 7B": ((896, 1, 19854), (120, 1, 6944), (84, 1, 2163), (56, 1, 2826)),
        "LLaMA 70B": ((1024, 2, 3214), (512, 4, 2725), (96, 2, 346), (64, 2, 1011)),
        "Falcon 180B": ((1024, 4, 1100), (1024, 8, 837), (64, 4, 112), (64, 4, 246)),
    },
    "h200": {
        "GPT-J 6B": ((1024, 1, 27304), (120, 1, 8530), (64, 1, 2785), (64, 1, 3753)),
        "Mistral 7B": ((896, 1, 20460), (120, 1, 8950), (64, 1, 2423), (56, 1, 3867)),
        "Mixtral 8x7B": ((1024, 2, 5444), (256, 2, 4973), (64, 2, 605), (64, 2, 1821)),
        "LLaMA 7B": ((896, 1, 20618), (120, 1, 8348), (64, 1, 2391), (56, 1, 3522)),
        "LLaMA 70B": ((1024, 1, 3989), (512, 2, 3963), (64, 1, 418), (64, 1, 1458)),
        "Falcon 180B": ((1024, 4, 1118), (1024, 4, 990), (64, 4, 118), (64, 4, 265)),
    },
    "a100-80g-fused": {
        "GPT-J 6B": ((512, 1, 5876), (32, 1, 1549), (32, 1, 545), (32, 1, 815)),
        "Mistral 7B": ((896, 1, 6251), (120, 1, 3776), (64, 1, 698), (56, 1, 1576)),
        "Mixtral 8x7B": ((512, 2, 2842), (128, 2, 1724), (64, 2, 319), (32, 2, 801)),
        "LLaMA 7B": ((256, 1, 5390), (32, 1, 1484), (32, 1, 533), (16, 1, 603)),
        "LLaMA 70B": ((1024, 4, 686), (512, 8, 684), (96, 4, 80), (64, 4, 289)),
        "Falcon 180B": ((1024, 8, 254), (512, 8, 266), (64, 8, 29), (64, 8, 93)),
    },
}


# Seconds of the same batches and lengths by the kernels of TensorRT-LLM 1.3, on A100 of 1.0: aiconfigurator 0.12.0, as
# below. It has no GPT-J and no Falcon.
_TENSORRT_AGAIN = {
    "h100-sxm": {
        "Mistral 7B": (4.0, 17.64, 3.71, 20.13),
        "Mixtral 8x7B": (3.03, 27.39, 3.36, 25.12),
        "LLaMA 7B": (6.02, 40.44, 5.31, 47.89),
        "LLaMA 70B": (20.34, 86.54, 17.49, 62.49),
    },
    "h200": {
        "Mistral 7B": (3.74, 14.33, 2.68, 16.38),
        "Mixtral 8x7B": (4.21, 28.83, 2.83, 22.12),
        "LLaMA 7B": (5.75, 36.4, 3.87, 43.06),
        "LLaMA 70B": (31.78, 113.64, 19.32, 82.9),
    },
    "a100-80g-fused": {
        "Mistral 7B": (15.57, 45.65, 10.5, 52.03),
        "Mixtral 8x7B": (14.66, 82.67, 16.32, 73.9),
        "LLaMA 7B": (5.66, 44.02, 7.64, 55.46),
        "LLaMA 70B": (45.13, 184.26, 37.7, 101.16),
    },
}

# Seconds of a whole batch, from its prompts to its last tokens, for 1,024 and 512 tokens unless they are named:
# `aiconfigurator cli estimate --estimate-mode static` of aiconfigurator 0.12.0, which adds up kernels of TensorRT-LLM
# 1.3 (of 1.0 on A100) that were measured on each GPU.
_KERNELS = (
    ("h100-sxm", "Llama 3.1 8B", 1, {8: 3.873, 32: 5.203, 128: 10.051}),
    ("h100-sxm", "Llama 3.1 8B", 1, {(8, 512, 2048): 15.121, (32, 512, 2048): 18.975, (128, 512, 2048): 33.312}),
    ("h100-sxm", "Llama 3.1 70B", 4, {8: 8.696, 32: 11.485, 128: 21.354}),
    ("h100-sxm", "Llama 3.1 70B", 4, {(8, 512, 2048): 33.3, (32, 512, 2048): 39.304, (128, 512, 2048): 58.718}),
    ("h100-sxm", "Llama 3.1 70B", 8, {32: 7.759, 128: 14.548}),
    ("h100-sxm", "Qwen3 8B", 1, {32: 5.453, 256: 18.071}),
    ("h100-sxm", "Qwen3 32B", 2, {8: 7.972, 32: 10.567, 128: 18.728}),
    ("h100-sxm", "Qwen3 30B-A3B", 2, {8: 3.558, 32: 6.637, 128: 9.823}),
    ("h100-sxm", "Qwen3 235B-A22B", 8, {32: 13.95, 128: 21.761}),
    ("h200", "Llama 3.1 8B", 1, {8: 3.049, 32: 4.247, 128: 8.112}),
    ("h200", "Llama 3.1 70B", 4, {8: 6.751, 32: 9.446, 128: 18.534}),
    ("h200", "Qwen3 32B", 2, {32: 8.609, 128: 15.777}),
    ("b200", "Llama 3.1 8B", 1, {8: 1.983, 32: 2.66, 128: 4.98}),
    ("b200", "Llama 3.1 70B", 4, {8: 4.974, 32: 6.05, 128: 11.206}),
    ("b200", "Qwen3 32B", 2, {32: 5.427, 128: 9.705}),
    ("a100-80g-fused", "Llama 3.1 8B", 1, {8: 6.969, 32: 9.441, 128: 19.935}),
    ("a100-80g-fused", "Llama 3.1 70B", 4, {8: 15.419, 32: 21.382}),
)
_KERNELS_FP8 = (
    ("h100-sxm", "Llama 3.1 8B", 1, {8: 2.932, 32: 3.762, 128: 6.688}),
    ("h100-sxm", "Llama 3.1 70B", 4, {8: 5.526, 32: 7.445, 128: 14.792}),
    ("h100-sxm", "Llama 3.1 70B", 2, {32: 11.626}),
    ("h200", "Llama 3.1 70B", 2, {32: 9.439, 128: 18.357}),
)
_SUMMED = {
    "Llama 3.1 8B": "llama3-8b",
    "Llama 3.1 70B": "llama3-70b",
    "Qwen3 8B": "qwen3-8b",
    "Qwen3 32B": "qwen3-32b",
    "Qwen3 30B-A3B": "qwen3-30b-a3b",
    "Qwen3 235B-A22B": "qwen3-235b-a22b",
}
_GPUS = {"h100-sxm": "H100", "h200": "H200", "b200": "B200", "a100-80g-fused": "A100"}


def _decoding(machine: str, name: str, tp: int, lengths: tuple[int, int, int], **given: Any) -> Decoding:
    """Return generation of so many texts with prompts and responses of some tokens."""
    concurrent, prompt, response = lengths
    return Decoding(
        name=f"{name}, {prompt}/{response}",
        hardware=machine,
        tp=tp,
        concurrent=concurrent,
        prompt=prompt,
        response=response,
        **given,
    )


def _decodings() -> list[Decoding]:
    apart = {"Mixtral 8x7B": ", Mixtral 8x7B", "Falcon 180B": ", Falcon 180B"}
    apart |= dict.fromkeys(("Mistral 7B", "LLaMA 70B"), ", shared keys")
    return [
        _decoding(
            *(machine, name, tp, (concurrent, prompt, response)),
            group=f"{_GPUS[machine]}, {'fp16' if machine == 'a100-80g-fused' else 'FP8'}{apart.get(name, '')}",
            model=_DECODED[name],
            fp8=machine != "a100-80g-fused",
            fitted=machine != "h200" and name == "LLaMA 7B",
            tokens_per_s=tokens,
        )
        for machine, models in _TENSORRT.items()
        for name, rows in models.items()
        for (prompt, response), (concurrent, tp, tokens) in zip(_LENGTHS, rows, strict=True)
    ]


def _sums() -> list[Decoding]:
    return [
        _decoding(
            *(machine, name, tp, lengths),
            group=f"{_GPUS[machine]}, {'FP8' if fp8 else 'bf16'}{', mixtures' if '-A' in name else ''}",
            model=_SUMMED[name],
            fp8=fp8,
            fitted=machine == "h100-sxm" and name.startswith("Llama"),
            tokens_per_s=lengths[0] * lengths[2] / value / tp,
        )
        for fp8, rows in ((False, _KERNELS), (True, _KERNELS_FP8))
        for machine, name, tp, seconds in rows
        for key, value in seconds.items()
        for lengths in (key if isinstance(key, tuple) else (key, 1024, 512),)
    ]


def _again() -> list[Decoding]:
    return [
        _decoding(
            *(machine, name, tp, (concurrent, prompt, response)),
            group=f"{_GPUS[machine]}, {'bf16' if machine == 'a100-80g-fused' else 'FP8'}, {name}",
            model=_DECODED[name],
            fp8=machine != "a100-80g-fused",
            fitted=False,
            tokens_per_s=concurrent * response / seconds / tp,
        )
        for machine, models in _TENSORRT_AGAIN.items()
        for name, times in models.items()
        for seconds, (prompt, response), (concurrent, tp, _) in zip(
            times, _LENGTHS, _TENSORRT[machine][name], strict=True
        )
    ]


SUMS = tuple(_sums())
AGAIN = tuple(_again())
DECODINGS = tuple(_decodings())


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The most that a rank of a published run allocated.

    Attributes:
        gib: By ``torch.cuda.max_memory_allocated``, of the rank with the most.
    """

    name: str
    size: Size
    layout: str
    sequence: int
    gib: float

    def estimate_gib(self) -> float:
        """Return the memory of the fullest stage."""
        layout = ParallelLayout.parse(self.layout)
        step = TrainStep(layout=layout, sequence=self.sequence, batch=4 * layout.dp, micro_batch=1)
        return max(sum(stage.values()) for stage in train_bytes(self.size, step).values()) / 2**30

    @property
    def error(self) -> float:
        """Return by how much the estimate is off, in percent."""
        return 100 * (self.estimate_gib() / self.gib - 1)


def _memories() -> list[Memory]:
    """SimuMax's b200_release_v1.2_summary: Megatron-LM on one node of B200, some layers of a model."""
    few = _part_of_deepseek()
    large, huge = model_size(_LLAMA_70B_PART), model_size(_LLAMA_405B_PART)
    rows = (
        ("Llama 3 70B, 12 layers", large, "pp2.dp4", 4096, 66.55),
        ("Llama 3 70B, 12 layers", large, "tp2.dp4", 4096, 60.68),
        ("Llama 3 70B, 12 layers", large, "tp4.dp2", 4096, 39.07),
        ("Llama 3 70B, 12 layers", large, "tp8", 4096, 28.29),
        ("Llama 3.1 405B, 4 layers", huge, "pp2.dp4", 4096, 87.08),
        ("Llama 3.1 405B, 4 layers", huge, "tp2.dp4", 4096, 81.59),
        ("Llama 3.1 405B, 4 layers", huge, "tp4.dp2", 4096, 52.89),
        ("Llama 3.1 405B, 4 layers", huge, "tp8", 4096, 38.57),
        ("DeepSeek-V3, 4 layers", few, "dp8.ep8.etp1", 4096, 104.30),
        ("DeepSeek-V3, 4 layers", few, "pp2.dp4.ep4.etp1", 4096, 114.00),
        ("Llama 3 70B, 12 layers", large, "tp2.cp4", 32768, 68.43),
        ("Llama 3 70B, 12 layers", large, "cp8", 32768, 104.51),
        ("Llama 3.1 405B, 4 layers", huge, "tp2.cp4", 32768, 87.03),
        ("Llama 3.1 405B, 4 layers", huge, "cp8", 32768, 139.22),
        ("Llama 3 70B, 12 layers", large, "tp2.cp4", 131072, 112.67),
        ("Llama 3 70B, 12 layers", large, "cp8", 131072, 147.99),
        ("Llama 3.1 405B, 4 layers", huge, "tp2.cp4", 131072, 118.13),
    )
    return [
        Memory(name=name, size=size, layout=layout, sequence=sequence, gib=gib)
        for name, size, layout, sequence, gib in rows
    ]


MEMORIES = tuple(_memories())

"""Estimates of time and memory beside published measurements and hand-computed figures."""

import json
from dataclasses import replace

import pytest

from hybridflow import cli
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.accuracy import ERRORS
from hybridflow.mapping.estimate import (
    TrainStep,
    decode_bytes,
    decode_seconds,
    forward_seconds,
    train_bytes,
    train_seconds,
)
from hybridflow.mapping.hardware import hardware
from hybridflow.mapping.sizes import Size, model_size
from hybridflow.models.shapes import known_models, model_spec
from hybridflow.reshard.fsdp import weight_holdings
from hybridflow.reshard.plan import held_bytes


def gpt(layers: int, hidden: int, heads: int, vocab: int) -> Size:
    text = f"layers={layers},hidden={hidden},heads={heads},ffn={4 * hidden},vocab={vocab},gated=false,tied=true"
    return model_size(text)


def estimate(capsys, *words: str) -> dict:
    assert cli.main(["plan", "estimate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# Megatron-LM's table of model sizes: sequences of 4096, a batch of 192, micro-batches of 1.
@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "layout", "tflops"),
    [(24, 2048, 16, "dp48", 408.8), (30, 4096, 32, "tp2.dp48", 465.9), (32, 6144, 48, "tp4.dp48", 489.1)],
)
def test_steps_of_megatron_on_h100(capsys, layers, hidden, heads, layout, tflops):
    model = f"layers={layers},hidden={hidden},heads={heads},ffn={4 * hidden},vocab=131072,gated=false,tied=true"
    found = estimate(capsys, "--phase", "train", "--model", model, "--layout", layout, "--batch", "192")
    assert found["tflops_per_gpu"] == pytest.approx(tflops, rel=ERRORS["train", "h100-sxm"][0] / 100)
    assert found["tokens_per_s"] == pytest.approx(192 * 4096 / found["seconds"])
    assert sum(found["breakdown"].values()) == pytest.approx(found["seconds"])


# aiconfigurator: Llama 8B in TensorRT-LLM on an H100, 1024 tokens in, 512 out.
@pytest.mark.parametrize(("concurrent", "milliseconds"), [(8, 7.42), (32, 9.88), (128, 19.26)])
def test_decoding_on_h100(capsys, concurrent, milliseconds):
    words = ("--phase", "generate", "--model", "llama3-8b", "--layout", "tp1", "--concurrent", str(concurrent))
    found = estimate(capsys, *words)
    assert 1e3 * found["seconds_per_token"] == pytest.approx(milliseconds, rel=0.04)
    assert found["seconds_per_token"] == found["seconds"] / 512 > found["seconds_per_decoded_token"]
    assert sum(found["breakdown"].values()) == pytest.approx(found["seconds"])
    # 32 layers of 8 heads of 128 dims, keys and values, in bf16.
    memory = found["memory_bytes"]["every GPU"]
    assert memory["cache"] == concurrent * 1536 * 131072
    assert memory["weights"] == pytest.approx(2 * 8.03e9, rel=1e-3)


def test_operations_are_those_of_the_formula_of_megatron():
    # arXiv 2104.04473, with the factor 72 for 96 where nothing is computed anew: 72 B s l h² (1 + s/6h + V/12lh).
    size = gpt(96, 12288, 96, 51200)
    expected = 72 * 64 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 96 * 12288))
    assert size.training_flops(64 * 2048, 2048) == pytest.approx(expected)


def test_activations_are_those_of_the_formula_less_dropout():
    # arXiv 2205.05198: 34 s b h / t bytes a layer, of which 2 are masks of dropout; with full recompute 2 s b h / t.
    size, inputs = gpt(8, 1024, 8, 4096), 512 * 2 * 1024 / 4
    logits = 512 * 2 * 4096 / 4 * 6
    for recompute, of_a_stage in (("none", 8 * 32 * inputs), ("full", 8 * 2 * inputs + 32 * inputs)):
        step = TrainStep(
            layout=ParallelLayout(tp=4),
            sequence=512,
            batch=8,
            micro_batch=2,
            recompute=recompute,
        )
        found = train_bytes(size, step)["first"]
        assert found["activations"] == of_a_stage + logits
        # 12 h² a layer and one table: 2 + 4 + 12 bytes of each.
        weights = (8 * 12 * 1024**2 + 4096 * 1024) / 4
        assert (found["weights"], found["gradients"], found["optimizer"]) == (2 * weights, 4 * weights, 12 * weights)


def test_activations_of_experts_and_latent_attention_are_counted_by_hand():
    experts = dict(num_experts=4, ffn_hidden_size=3, shared_ffn_hidden_size=5)
    experts |= dict(num_dense_layers=1, dense_ffn_hidden_size=8)
    latent = dict(kv_lora_rank=3, q_lora_rank=7, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5)
    words = dict(num_layers=2, hidden_size=4, num_attention_heads=2, vocab_size=10, max_context=3)
    size = Size(model=ModelConfig(**words, **experts, **latent))
    # Inputs of norms and products, 16; queries, keys and values, 4 · 11; compressed and normalized, 20; within blocks
    # 3 · 8 and 3 · (2 · 3 + 5); what goes to two experts and comes back, 0 and 16: in two layers 233 in bf16.
    of_a_token = 2 * (2 * (16 + 44 + 20) + 3 * (8 + 11) + 16) + 10 * 6
    step = TrainStep(layout=ParallelLayout(), sequence=3, batch=1, micro_batch=1)
    assert train_bytes(size, step)["first"]["activations"] == 3 * of_a_token == 3 * 526


def test_the_optimizer_writes_masters_beside_weights_of_bf16():
    machine = replace(hardware("h100-sxm"), update_launch=0.0)
    step = TrainStep(layout=ParallelLayout(), sequence=16, batch=1, micro_batch=1)
    bf16 = gpt(2, 64, 2, 128)
    both = [train_seconds(replace(bf16, item_bytes=size), machine, step)["optimizer"] for size in (2, 4)]
    assert both[0] / both[1] == pytest.approx(32 / 28)


@pytest.mark.parametrize(("layout", "more"), [("tp1", 128 * 64), ("pp2", 0)])
def test_the_optimizer_steps_an_output_layer_beside_the_embedding_where_a_rank_has_both(layout, more):
    machine, size = replace(hardware("h100-sxm"), update_launch=0.0), gpt(2, 64, 2, 128)
    step = TrainStep(layout=ParallelLayout.parse(layout), sequence=16, batch=1, micro_batch=1)
    sizes = [replace(size, model=replace(size.model, tied_embeddings=each)) for each in (True, False)]
    tied, untied = (train_seconds(each, machine, step)["optimizer"] for each in sizes)
    num_bytes = (untied - tied) * machine.memory_bandwidth * machine.memory_share
    assert num_bytes == pytest.approx(32 * more)


@pytest.mark.parametrize(("model", "tp"), [("llama3-8b", 1), ("qwen3-30b-a3b", 2)])
def test_decoding_has_the_weights_of_training(model, tp):
    size, layout = model_size(model), ParallelLayout(tp=tp)
    trained = train_bytes(size, TrainStep(layout=layout, sequence=1, batch=1, micro_batch=1))["first"]["weights"]
    assert decode_bytes(size, tp, 1, 1)["weights"] == pytest.approx(trained)


def test_stages_keep_the_micro_batches_that_are_under_way():
    def kept(layout: str) -> list[float]:
        step = TrainStep(layout=ParallelLayout.parse(layout), sequence=64, batch=32, micro_batch=1, recompute="none")
        found = train_bytes(gpt(16, 64, 2, 8), step)
        last = 64 * 8 * 6 / step.layout.tp
        of_one = 16 / step.layout.pp * 64 * 32 * 64
        return [(part["activations"] - (last if name == "last" else 0)) / of_one for name, part in found.items()]

    assert kept("pp4") == [4, 3, 1]
    # Interleaved: (vpp - 1) pp + 2 (pp - 1 - stage) + 1 chunks of half a stage.
    assert kept("pp4.vpp2") == [11 / 2, 9 / 2, 5 / 2]


def test_the_longest_stage_sets_the_time():
    def seconds(layout: str) -> float:
        step = TrainStep(layout=ParallelLayout.parse(layout), sequence=64, batch=4, micro_batch=1)
        return sum(train_seconds(gpt(16, 64, 2, 8), hardware("h100-sxm"), step).values())

    assert seconds("pp2.layers8-8") == seconds("pp2") < seconds("pp2.layers6-10") == seconds("pp2.layers10-6")
    step = TrainStep(layout=ParallelLayout.parse("pp2.layers6-10"), sequence=64, batch=4, micro_batch=1)
    found = train_bytes(gpt(16, 64, 2, 8), step)
    assert found["last"]["weights"] - found["first"]["weights"] == 4 * 12 * 64**2 * 2


def test_fp8_doubles_the_speed_of_products_of_layers_and_casts_what_goes_in():
    size = model_size("layers=4,hidden=4096,heads=32,ffn=16384,vocab=1,gated=false")
    peak = hardware("h100-sxm").flops
    machine = replace(hardware("h100-sxm"), half_size=0, product_share=0.5, fp8_share=0.5, fp8_flops=2 * peak)
    step = TrainStep(layout=ParallelLayout(tp=2), sequence=4096, batch=1, micro_batch=1)
    bf16, fp8 = (train_seconds(size, machine, replace(step, fp8=fp8)) for fp8 in (False, True))
    assert fp8["products"] == pytest.approx(bf16["products"] / 2, rel=5e-3)  # the output layer stays
    assert fp8["attention"] == bf16["attention"] and fp8["tensor parallel"] == bf16["tensor parallel"]
    # Products take in 4096, 4096, 4096 and 16384 numbers of a token, of which a rank casts half: 2 bytes are read and
    # twice 1 is written, and 1.5 times that backward.
    cast = 4 * 4096 * (4096 + 4096 + 4096 + 16384) / 2 * 4 * 2.5
    written = cast / (machine.memory_bandwidth * machine.elementwise_share)
    assert fp8["elementwise"] - bf16["elementwise"] == pytest.approx(written)
    # The four inputs of products have 1 byte in the place of 2.
    kept = [train_bytes(size, replace(step, fp8=fp8))["first"]["activations"] for fp8 in (False, True)]
    assert kept[0] - kept[1] == 4 * 4096 * (4096 + 4096 + 4096 + 16384) / 2


def test_fp8_halves_weights_and_cache_of_decoding(capsys):
    words = ("--phase", "generate", "--model", "llama3-8b", "--layout", "tp1")
    bf16, fp8 = (estimate(capsys, *words, "--dtype", dtype)["memory_bytes"]["every GPU"] for dtype in ("bf16", "fp8"))
    assert fp8["cache"] == bf16["cache"] / 2
    # The two tables stay in bf16.
    tables = 2 * 128256 * 4096 * 2
    assert fp8["weights"] - tables == pytest.approx((bf16["weights"] - tables) / 2)


def test_interleaved_stages_wait_for_the_first_and_last_messages_alone():
    size = gpt(16, 64, 2, 8)
    step = TrainStep(layout=ParallelLayout(pp=4), sequence=64, batch=32, micro_batch=1)
    plain = train_seconds(size, hardware("h100-sxm"), step)["pipeline messages"]
    interleaved = replace(step, layout=ParallelLayout(pp=4, vpp=2))
    found = train_seconds(size, hardware("h100-sxm"), interleaved)["pipeline messages"]
    # 3 of the 32 + 3 that a plain schedule waits for.
    assert found == pytest.approx(plain * 3 / 35)


@pytest.mark.parametrize(
    ("layout", "number", "learning", "scoring"),
    [
        ("pp4", 5, 8, 8),
        # One alone goes through all stages.
        ("pp4.vpp2", 1, 4, 4),
        ("pp4.vpp2", 3, 5, 5),
        ("pp4.vpp2", 4, 5.5, 5.5),
        # Three blank ones, of which each saves the sixth of a micro-batch where there are backward passes.
        ("pp4.vpp2", 5, 8 - 3 / 6, 8),
        ("pp4.vpp2", 8, 9.5, 9.5),
        ("pp2.vpp2", 7, 8 - 1 / 6, 8),
    ],
)
def test_stages_take_as_long_as_the_schedule_with_its_blank_micro_batches(layout, number, learning, scoring):
    # No output layer to speak of, and no time for messages.
    size, cut = replace(gpt(16, 1024, 8, 1), has_value_head=True), ParallelLayout.parse(layout)
    machine = replace(hardware("h100-sxm"), node_latency=0, node_bandwidth=1e18, pass_launch=0)

    def seconds(layout, number):
        step = TrainStep(layout=layout, sequence=1024, batch=number, micro_batch=1)
        parts = train_seconds(size, machine, step)
        after = parts["data parallel"] + parts["optimizer"] + parts["pipeline messages"]
        return sum(parts.values()) - after, forward_seconds(size, machine, step)

    of_one = [each / cut.pp for each in seconds(ParallelLayout(), 1)]
    found = [each / one for each, one in zip(seconds(cut, number), of_one, strict=True)]
    assert found == pytest.approx([learning, scoring], rel=0.01)


def test_a_layout_without_vpp_is_estimated_with_the_fastest(capsys):
    model = "layers=84,hidden=8192,heads=64,groups=64,ffn=32768,vocab=131072,gated=false"
    words = ("--phase", "train", "--model", model, "--nodes", "96", "--batch", "384", "--layout")
    found = {layout: estimate(capsys, *words, layout) for layout in ("tp8.pp2", "tp8.pp2.vpp1", "tp8.pp2.vpp42")}
    assert found["tp8.pp2"]["layout"] == "tp8.pp2.dp48.vpp42" and "add vpp1" in found["tp8.pp2"]["assumed"]
    assert found["tp8.pp2"]["seconds"] == found["tp8.pp2.vpp42"]["seconds"] < found["tp8.pp2.vpp1"]["seconds"]
    assert found["tp8.pp2.vpp1"]["assumed"] is None
    assert cli.main(["plan", "estimate", *words, "tp8.pp2"]) == 0
    assert "assumed: vpp42" in capsys.readouterr().out
    # 126 layers on 8 stages: with embedding and output layer 16 each.
    words = ("--phase", "train", "--model", "llama3-405b", "--nodes", "16", "--batch", "16", "--layout", "tp8.pp8")
    assert estimate(capsys, *words)["layout"] == "tp8.pp8.dp2.vpp8"
    # 5 micro-batches cannot be interleaved over 2 stages.
    words = ("--phase", "train", "--model", model, "--nodes", "96", "--batch", "240")
    uneven = estimate(capsys, *words, "--layout", "tp8.pp2")
    assert uneven["layout"] == "tp8.pp2.dp48"


def test_sizes_that_are_left_out():
    size = model_size("layers=2,hidden=4096,ffn=16384,vocab=50257")
    assert (size.model.num_attention_heads, size.model.query_groups, size.model.head_size) == (32, 32, 128)
    assert size.gated and not size.tied


def test_a_directory_tells_the_sizes(tmp_path):
    values = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096},
        **{"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
        **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16"},
        **{"hidden_act": "silu", "tie_word_embeddings": False},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    found, known = model_size(str(tmp_path)), model_size("llama3-8b")
    assert found == model_size(str(path))
    weights = ("layer_weights", "table_weights", "output_weights", "tied")
    assert all(getattr(found, each) == getattr(known, each) for each in weights)
    assert (found.model.num_layers, found.cached_bytes(1)) == (known.model.num_layers, known.cached_bytes(1))


# Parameters in all and active ones of a token, in billions, as their makers say.
@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141, 39),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("deepseek-v3", 671, 37),
        ("gpt-oss-120b", 116.8, 5.1),
    ],
)
def test_a_mixture_has_the_parameters_that_its_maker_says(model, total, active):
    size = model_size(model)
    layers = size.model.num_layers
    weights = layers * (size.layer_weights + size.expert_weights) + 2 * size.table_weights
    assert weights == pytest.approx(total * 1e9, rel=0.01)
    # Makers round, and some leave out the embedding.
    used = layers * size.active_weights
    assert used * 0.98 < active * 1e9 < (used + 2 * size.table_weights) * 1.02


@pytest.mark.parametrize(
    ("model", "layout", "has_value_head"),
    [
        ("qwen3-30b-a3b", "tp2.pp2.dp4.ep4", False),
        ("qwen3-30b-a3b", "tp2.dp4.ep8.etp1", False),
        ("deepseek-v3", "tp4.pp1.dp8.ep8", False),
        ("qwen3.5-9b", "tp2.pp2.dp2", False),
        ("gemma4-31b", "tp2.pp2.dp2", False),
        ("gemma4-26b-a4b", "tp2.dp4.ep4", False),
        # Tied: one embedding, of a critic too, whose output is one column.
        ("llama3-1b", "tp2.dp2", False),
        ("llama3-1b", "tp2.dp2", True),
    ],
)
def test_weights_of_a_rank_are_those_of_its_tensors(model, layout, has_value_head):
    shape, cut = known_models()[model], ParallelLayout.parse(layout)
    mesh = DeviceMesh(name="actor", layout=cut, ranks=tuple(range(cut.world_size)), ranks_per_node=8)
    spec = model_spec(shape, has_value_head=has_value_head)
    held = held_bytes(spec, weight_holdings(spec, mesh), mesh.first_of_stage(0))
    step = TrainStep(layout=cut, sequence=64, batch=8, micro_batch=1)
    size = model_size(model)
    size = replace(size, has_value_head=has_value_head)
    assert train_bytes(size, step)["first"]["weights"] == pytest.approx(held, rel=0.002)
    if model == "llama3-1b" and not has_value_head:
        assert decode_bytes(size, cut.tp, 1, 1)["weights"] == pytest.approx(held, rel=0.002)


def test_a_mixture_of_one_expert_is_a_dense_model():
    dense = model_size("layers=8,hidden=1024,heads=8,ffn=4096,vocab=4096")
    mixture = replace(dense, model=replace(dense.model, num_experts=1, experts_per_token=1))
    step = TrainStep(layout=ParallelLayout(tp=2, dp=4), sequence=512, batch=8, micro_batch=2)
    one, other = (train_seconds(size, hardware("h100-sxm"), step) for size in (dense, mixture))
    assert other["products"] == pytest.approx(one["products"], rel=0.02)  # the router is there besides
    assert mixture.training_flops(512, 512) == pytest.approx(dense.training_flops(512, 512), rel=1e-3)
    # Tokens that travel to the expert are in the place of one of two sums.
    assert other["tensor parallel"] == pytest.approx(one["tensor parallel"] / 2) and one["expert parallel"] == 0
    layout = ParallelLayout(tp=2)
    one, other = (decode_seconds(size, hardware("h100-sxm"), layout, 64, 512) for size in (dense, mixture))
    assert other["tensor parallel"] == one["tensor parallel"] > 0 == other["expert parallel"]


def test_tokens_travel_to_experts_and_back():
    size, machine = model_size("mixtral-8x7b"), hardware("h100-sxm")
    step = TrainStep(layout=ParallelLayout(dp=8, ep=8), sequence=4096, batch=8, micro_batch=1)
    # Forward and backward, there and back: two experts of each token, 7 of 8 elsewhere.
    moved = 4096 * 2 * 4096 * 2 * 7 / 8
    seconds = 32 * 4 * (moved / (machine.node_bandwidth * machine.node_share) + machine.node_latency)
    assert train_seconds(size, machine, step)["expert parallel"] == pytest.approx(seconds)


def test_layers_of_experts_add_to_each_pass():
    dense = model_size("layers=4,hidden=1024,heads=8,ffn=4096,vocab=4096")
    experts = dict(num_experts=8, ffn_hidden_size=1024, num_dense_layers=1, dense_ffn_hidden_size=4096)
    mixture = replace(dense, model=replace(dense.model, **experts))
    machine = hardware("h100-sxm")
    step = TrainStep(layout=ParallelLayout(), sequence=512, batch=2, micro_batch=1)
    # Two micro-batches; a backward pass counts as two; four layers and the output layer.
    added = train_seconds(mixture, machine, step)["launches"] - 2 * 3 * 5 * machine.pass_launch
    assert added == pytest.approx(2 * 3 * 3 * machine.route_launch)


def test_decoding_reads_the_experts_that_are_used():
    size, machine = model_size("qwen3-235b-a22b"), hardware("h100-sxm")
    read = machine.memory_bandwidth * machine.memory_share
    one, many = (
        decode_seconds(size, machine, ParallelLayout(tp=8), concurrent, 1)["products"] for concurrent in (1, 512)
    )
    assert one == pytest.approx(2 * 22e9 / 8 / read, rel=0.05)
    assert many > 2 * 230e9 / 8 / read
    # A group reads keys and values once, in two bytes a number; each of the 8 ranks has one of 4 groups.
    cached = decode_seconds(size, machine, ParallelLayout(tp=8), 2, 1000)["attention"]
    assert cached == pytest.approx(2000 * 94 * 2 * 128 * 2 / (machine.memory_bandwidth * machine.cache_share))
    # DeepSeek-V3: 512 + 64 numbers of each token in 61 layers, whole on each rank.
    assert decode_bytes(model_size("deepseek-v3"), 8, 1, 1000)["cache"] == 1000 * 61 * 576 * 2


def test_a_mixture_was_compared_with_nothing(capsys):
    found = estimate(capsys, "--phase", "train", "--model", "qwen3-30b-a3b", "--layout", "dp8.ep8")
    assert found["error"]["percent"] is None
    assert sum(found["breakdown"].values()) == pytest.approx(found["seconds"])


def test_nodes_fill_dp_and_text_says_what_does_not_fit(capsys):
    words = ("--phase", "train", "--model", "llama3-70b", "--layout", "tp8")
    assert estimate(capsys, *words, "--nodes", "4")["layout"].startswith("tp8")
    experts = ("--phase", "train", "--model", "qwen3-235b-a22b", "--nodes", "8", "--batch", "64", "--layout")
    assert estimate(capsys, *experts, "tp4.pp4.ep8.etp1")["gpus"] == 64
    assert estimate(capsys, *experts, "ep8")["gpus"] == 64
    assert cli.main(["plan", "estimate", *words, "--nodes", "4"]) == 0
    text = capsys.readouterr().out
    assert "on 32 × h100-sxm" in text and "more than 80 GB" in text and "within 8.0 % of" in text
    assert cli.main(["plan", "estimate", "--phase", "generate", *words[2:], "--hardware", "a100-80g"]) == 0
    assert "time: nothing: no measurement was compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "llama"), "--model llama: not one of"),
        (("--model", "layers=2"), "hidden, ffn, vocab missing"),
        (("--model", "layers=2,layers=3"), "each once"),
        (("--model", "layers=2e9"), "expected a whole number"),
        (("--model", "layers=2,hidden=4,heads=8,ffn=4,vocab=4"), "give head=N"),
        (("--model", "gated=yes"), "expected true or false"),
        (("--model", "layers=2,hidden=256,heads=6,groups=4,ffn=4,vocab=4"), "groups=4 does not divide heads=6"),
        (("--dtype", "fp8", "--hardware", "a100-80g"), "has no products in FP8"),
        (("--dtype", "fp32"), "is described for bf16"),
        (("--layout", "tp8.dp2", "--nodes", "4"), "32 GPUs"),
        (("--layout", "tp2.dp2.ep2"), "ep=2 does not divide model.num_experts=null"),
        (("--model", "mixtral-8x7b", "--layout", "dp3.ep3"), "ep=3 does not divide model.num_experts=8"),
        (("--layout", "fsdp2"), "fsdp and layers: auto are not estimated"),
        (("--layout", "tp3"), "tp=3 does not divide model.num_attention_heads=32"),
        (("--batch", "3", "--layout", "dp2"), "does not divide it; choose a multiple of 2"),
        (("--layout", "pp64"), "pp=64 is above model.num_layers=32"),
        (("--layout", "pp2.layers3-5"), "found 8"),
        (("--layout", "vpp2"), "virtual chunks interleave pipeline stages"),
        (("--layout", "pp2.vpp3"), "pp·vpp=2·3=6 does not divide model.num_layers=32"),
        (("--layout", "tp2", "--model", "layers=2,hidden=256,heads=2,ffn=5,vocab=8"), "model.ffn_hidden_size=5"),
        (("--model", "qwen3-30b-a3b", "--layout", "tp2.etp512.dp256"), "etp=512 does not divide model.ffn_hidden_size"),
        (("--layout", "tp2.etp1"), "etp=1 without experts in the model"),
        (("--phase", "generate", "--layout", "dp2"), "one replica cut by tp"),
        (("--phase", "generate", "--layout", "layers32"), "one replica cut by tp"),
    ],
)
def test_wrong_requests_end_with_2_and_say_what_is_wrong(capsys, words, message):
    usual = ("--phase", "train", "--model", "llama3-8b", "--layout", "tp1")
    assert cli.main(["plan", "estimate", *usual, *words]) == 2
    assert message in capsys.readouterr().err

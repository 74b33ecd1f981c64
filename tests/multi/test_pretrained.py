"""Models from directories compute what ``transformers`` computes of them, in every layout and for every role."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.cli import main
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.microbatch import pack
from hybridflow.models.training import forward_only
from hybridflow.models.weights import local_shards
from hybridflow.parallel.world import World
from hybridflow.placement.pretrained import from_pretrained
from hybridflow.roles.reward_model import last_tokens
from tests.support.checkpoint_cases import make_model, save
from tests.support.complaints import complains
from tests.support.conversions import convert
from tests.support.hf_models import write_model
from tests.support.quantized import write_fp8, write_mxfp4
from tests.support.ranks import run_ranks

VOCAB = 45
PAD = 2
LAYOUTS = [ParallelLayout(), ParallelLayout(tp=2, pp=2), ParallelLayout(tp=4)]


def sequences() -> list[torch.Tensor]:
    """Sequences of unequal length; one ends in padding, one is nothing else."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, VOCAB, (length,), generator=generator) for length in (9, 4, 17, 2)]
    return [*rows, torch.cat([rows[0][:5], torch.tensor([PAD, PAD])]), torch.tensor([PAD, PAD, PAD])]


def outputs(world: World, path: Path, layout: ParallelLayout, role: str, **options: Any) -> Any:
    """What a role's model gives for the sequences, in the order of the sequences; None but on the last stage."""
    mesh = DeviceMesh(name=role, layout=layout, ranks=tuple(range(layout.world_size)), ranks_per_node=world.size)
    made = from_pretrained(path, world, mesh, role=role, **options)
    if made.transformer is None:
        return None
    rows = sequences()
    batch = pack(list(range(len(rows))), rows, [1] * len(rows), world.device)
    if role == "reward":
        batch = last_tokens(batch, PAD)
    found = forward_only(made.transformer, made.groups, [batch], lambda output, _: output.float())
    return found[0].numpy() if found else None


def whole(ranks: list[Any], layout: ParallelLayout) -> torch.Tensor:
    """The logits of all tensor parallel ranks side by side, without padding."""
    stages = [found for found in ranks if found is not None]
    assert len(stages) == layout.tp
    return torch.cat([torch.from_numpy(found) for found in stages], 1)[:, :VOCAB]


def roles_in(world: World, folder: Path, layout: ParallelLayout) -> dict[str, Any]:
    return {
        "actor": outputs(world, folder / "causal", layout, "actor"),
        "critic": outputs(world, folder / "scorer", layout, "critic"),
        "reward": outputs(world, folder / "scorer", layout, "reward"),
        "ours": outputs(world, folder / "ours", layout, "actor"),
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_role_computes_what_transformers_computes(tmp_path, layout):
    causal = write_model(tmp_path / "causal", "Qwen2", seed=1)
    scorer = write_model(tmp_path / "scorer", "Llama", "ForSequenceClassification", seed=2)
    convert(tmp_path / "causal", "megatron", tmp_path / "ours", layout=ParallelLayout(pp=2, tp=4))
    ranks = run_ranks(roles_in, layout.world_size, tmp_path, layout)
    rows = sequences()
    with torch.no_grad():
        logits = torch.cat([causal(row[None]).logits[0, :-1] for row in rows])
        hidden = [scorer.model(row[None]).last_hidden_state[0] for row in rows]
        values = torch.cat([scorer.score(states)[:-1] for states in hidden]).numpy()
        # Side by side and padded, as a trainer of transformers would have them.
        side = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        is_there = torch.arange(side.shape[1])[None] < torch.tensor([[len(row)] for row in rows])
        scores = scorer(side, attention_mask=is_there).logits.numpy()
    for name in ("actor", "ours"):
        found = whole([each[name] for each in ranks], layout)
        assert found.shape == logits.shape and logits.std() > 0.5
        assert (found - logits).abs().max() <= 1e-4, name
    for each in ranks[-layout.tp :]:
        assert numpy.abs(each["critic"] - values).max() <= 1e-4 and values.std() > 0.1
        assert numpy.abs(each["reward"] - scores).max() <= 1e-4 and scores.std() > 0.1


def shards_of(world: World, path: Path, layout: ParallelLayout, role: str, options: dict[str, Any]) -> Any:
    mesh = DeviceMesh(name=role, layout=layout, ranks=tuple(range(layout.world_size)), ranks_per_node=world.size)
    made = from_pretrained(path, world, mesh, role=role, **options)
    if made.transformer is None:
        return made.groups
    held = local_shards(made.transformer, made.spec, mesh, world.rank)
    assert {tensor.dtype for tensor, _ in held.values()} == {made.transformer.config.params_dtype}
    tensors = {name: tensor.float().numpy() for name, (tensor, _) in held.items()}
    return tensors, made.model.dtype, made.transformer.max_sequence_length


def test_critic_of_a_language_model_has_a_new_head_and_ranks_outside_have_nothing(tmp_path):
    theirs = write_model(tmp_path / "causal", "Llama", tie_word_embeddings=True)
    options = {"dtype": "bf16", "max_context": 24, "seed": 4}
    made, outside = run_ranks(shards_of, 2, tmp_path / "causal", ParallelLayout(), "critic", options)
    tensors, dtype, context = made
    assert outside is None and context == 24 and dtype == "bf16"
    assert "output_layer.weight" not in tensors
    embedding = theirs.get_input_embeddings().weight
    assert (tensors["embedding.word_embeddings.weight"] == embedding.detach().bfloat16().float().numpy()).all()
    head = tensors["value_head.weight"]
    assert head.shape == (1, 32) and 0.01 < head.std() < 0.03, "initializer_range is 0.02"
    (again, _, _), _ = run_ranks(shards_of, 2, tmp_path / "causal", ParallelLayout(), "critic", {**options, "seed": 5})
    assert (again["value_head.weight"] != tensors["value_head.weight"]).any()
    assert (again["decoder.final_layernorm.weight"] == tensors["decoder.final_layernorm.weight"]).all()


def test_padding_of_the_vocabulary_is_zero(tmp_path):
    theirs = write_model(tmp_path / "causal")
    ranks = run_ranks(shards_of, 2, tmp_path / "causal", ParallelLayout(tp=2), "actor", {})
    tables = numpy.concatenate([tensors["embedding.word_embeddings.weight"] for tensors, _, _ in ranks])
    assert tables.shape[0] == VOCAB + 1 and not tables[VOCAB:].any()
    assert (tables[:VOCAB] == theirs.get_input_embeddings().weight.detach().numpy()).all()


def coded_and_plain(world: World, folder: Path, layouts: list[str], dtype: Any) -> list[bool]:
    """Whether this rank's part of each model is the same bits, from codes and from the directory that convert made."""
    same = []
    for family, text in itertools.product(("deepseek_v3", "gpt_oss"), layouts):
        layout, held = ParallelLayout.parse(text), []
        mesh = DeviceMesh(name="actor", layout=layout, ranks=tuple(range(world.size)), ranks_per_node=world.size)
        for kind in ("coded", "plain"):
            made = from_pretrained(folder / family / kind, world, mesh, dtype=dtype)
            held.append(local_shards(made.transformer, made.spec, mesh, world.rank))
        one, other = held
        assert one.keys() == other.keys() and len(one) > 10
        same.append(all(torch.equal(one[name][0], other[name][0]) for name in one))
    return same


@pytest.mark.slow
def test_a_rank_starts_from_weights_in_codes_in_every_layout(tmp_path):
    write_fp8(save(make_model("deepseek_v3"), tmp_path / "deepseek_v3/coded"), (5, 7))
    write_mxfp4(save(make_model("gpt_oss", intermediate_size=64), tmp_path / "gpt_oss/coded"))
    layouts = ["tp4", "tp2.pp2", "ep2.dp4", "tp2.dp2.ep2"]
    for dtype in ("bf16", "fp32"):
        for name in ("deepseek_v3", "gpt_oss"):
            shutil.rmtree(tmp_path / name / "plain", ignore_errors=True)
            arguments = [str(tmp_path / name / kind) for kind in ("coded", "plain")]
            # Left out, the dtype of DeepSeek's fp32 tensors stays, as a run has it.
            asked = ["--dtype", dtype] if dtype == "fp32" else []
            assert main(["convert", *arguments, "--to", "hf", *asked, "--quiet"]) == 0
        ranks = run_ranks(coded_and_plain, 4, tmp_path, layouts, dtype)
        assert ranks == [[True] * 2 * len(layouts)] * 4


def refused(world: World, cases: list[tuple[Path, str, type[Exception], str]]) -> None:
    for path, role, kind, says in cases:
        mesh = DeviceMesh(name=role, layout=ParallelLayout(), ranks=(0,), ranks_per_node=1)
        complains(partial(from_pretrained, path, world, mesh, role=role), [says, str(path)], kind)


def test_what_is_no_model_for_the_role_is_refused_by_name(tmp_path):
    write_model(tmp_path / "causal")
    write_model(tmp_path / "scorer", "Llama", "ForSequenceClassification")
    write_model(tmp_path / "many", "Llama", "ForSequenceClassification", num_labels=3)

    def changed(name: str, change: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(tmp_path / "causal", folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    norm = "model.layers.1.input_layernorm.weight"
    cut = changed("cut", lambda tensors: None)
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[:-100])
    other = changed("other", lambda tensors: None)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "bloom"}))
    cases = [
        (tmp_path / "nowhere", "actor", CheckpointError, "nowhere"),
        (tmp_path / "scorer", "actor", ConfigError, "found a scorer, expected a language model for the actor"),
        (tmp_path / "causal", "reward", ConfigError, "found a language model, expected a scorer for the reward"),
        (tmp_path / "many", "reward", ConfigError, "3 labels"),
        (changed("lacking", lambda t: t.pop(norm)), "actor", CheckpointError, norm),
        (changed("more", lambda t: t.update(strange=torch.ones(2))), "actor", CheckpointError, "strange"),
        (changed("wide", lambda t: t.update({norm: torch.ones(31)})), "actor", CheckpointError, norm),
        (cut, "actor", CheckpointError, "model.safetensors"),
        (other, "actor", ConfigError, "bloom"),
    ]
    run_ranks(refused, 1, cases)


def test_flipped_bit_of_a_model_directory_is_found(tmp_path):
    write_model(tmp_path / "causal")
    convert(tmp_path / "causal", "megatron", tmp_path / "ours", layout=ParallelLayout(tp=2))
    file = tmp_path / "ours/tp01-pp00.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for says in ("sha256", file.name):
        run_ranks(refused, 1, [(tmp_path / "ours", "actor", CheckpointError, says)])


@pytest.mark.slow
def test_example_of_the_documentation_runs(tmp_path):
    (tmp_path / "models").mkdir()
    write_model(tmp_path / "models/policy")
    root = Path(__file__).parents[2]
    (code,) = re.findall(r"^```python\n(.*?)^```$", (root / "docs/pretrained.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "example.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"[3, {VOCAB}]\n", done.stderr


_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of malloc.h."""


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def bytes_while_reading(world: World, path: Path, read_before: Path) -> tuple[int, int]:
    """What the weights take, and the most that was there at any time above what there was before."""
    mesh = DeviceMesh(name="actor", layout=ParallelLayout(), ranks=(0,), ranks_per_node=1)
    # All that is freed goes back at once: the allocator else keeps some of it, now more, now less.
    assert ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16) == 1
    from_pretrained(read_before, world, mesh)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, peak, is_done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    made = from_pretrained(path, world, mesh)
    is_done.set()
    watcher.join()
    return sum(weight.numel() * weight.element_size() for weight in made.transformer.parameters()), peak - before


@pytest.mark.slow
def test_reading_takes_the_memory_of_a_tensor_or_two(tmp_path):
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, vocab_size=20000)
    write_model(tmp_path / "causal", num_key_value_heads=8, **sizes)
    largest = 20000 * 512 * 4
    convert(tmp_path / "causal", "megatron", tmp_path / "ours", layout=ParallelLayout(tp=2))
    # The first reading also takes what Python and its libraries keep for the next.
    write_model(tmp_path / "small", num_key_value_heads=8, **{**sizes, "vocab_size": 512})
    convert(tmp_path / "small", "megatron", tmp_path / "small-ours", layout=ParallelLayout(tp=2))
    for path, small in (("causal", "small"), ("ours", "small-ours")):
        ((weights, peak),) = run_ranks(bytes_while_reading, 1, tmp_path / path, tmp_path / small)
        assert weights > 5 * largest
        # Two of the largest tensor, and small buffers.
        assert 0.9 * weights < peak < weights + 2 * largest, (path, weights, peak, largest)

"""Prompts with images: every layout computes what ``transformers`` does with the same weights and the same pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from torch import Tensor

from hybridflow.checkpoint.formats.registry import open_model
from hybridflow.data.images import Grid, image_ids
from hybridflow.families.images import image_settings
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.gpt import Transformer, build_transformer
from hybridflow.models.images import ImageReader
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.microbatch import MicroBatch, pack
from hybridflow.models.shapes import model_spec
from hybridflow.models.training import forward_only
from hybridflow.models.weights import local_shards
from hybridflow.placement.vision_tower import VisionTower
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.request import Request, SamplingParams
from tests.multi.jobs import inner_of, outer_of
from tests.multi.models import place
from tests.support.hf_models import IMAGE_TOKEN, write_vision_model
from tests.support.ranks import run_ranks

VOCAB = 45
SIZES = ((40, 70), (33, 20), (64, 90), (16, 16))
"""Height and width of each image, in pixels."""
PROMPTS = (
    ([5, 6], 0, [7, 8]),
    ([9], 1, [14], 2, [10]),
    ([5, 6], 0, [7, 8]),
    ([11, 12, 13],),
    ([], 3, [4]),
)
"""Tokens of text, and images by their numbers."""
MIXED = ("Qwen3VL", "Qwen3_5")
LAYOUTS = {text: ParallelLayout.parse(text) for text in ("tp1", "tp2", "pp2", "cp2")}
LAYOUTS["whole tokens"] = ParallelLayout(tp=2, sequence_parallel=False)
ANSWERS = ([1, 2, 3], [20, 21], [30, 3], [9, 9, 1, 2], [17])


@dataclass(frozen=True)
class Drawn:
    """Images of random pixels, as the image processor of ``transformers`` takes them."""

    folder: Path

    def image(self, number: int) -> PIL.Image.Image:
        height, width = SIZES[number]
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return PIL.Image.fromarray(pixels)

    def processed(self, number: int) -> Any:
        processor = transformers.AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        return processor([self.image(number)], return_tensors="pt")

    def grid(self, number: int) -> Grid:
        return image_settings(self.folder).grid(*self.image(number).size)

    def patches(self, number: int) -> Tensor:
        patches: Tensor = self.processed(number)["pixel_values"]
        return patches


def reader_of(folder: Path) -> ImageReader:
    tower = VisionTower(folder, torch.float32, torch.device("cpu"))
    return ImageReader(image_settings(folder), Drawn(folder), tower)


def our_tokens(prompt: tuple[Any, ...], pixels: Drawn) -> list[int]:
    """A prompt as hybridflow has it: an id of its own for each token of an image."""
    tokens: list[int] = []
    for part in prompt:
        if isinstance(part, int):
            rows, columns = pixels.grid(part)
            part = image_ids(part, rows * columns)
        tokens += part
    return tokens


def their_logits(model: Any, prompt: tuple[Any, ...], answer: list[int], pixels: Drawn) -> Tensor:
    """Behind the prompt's last token and each token of the answer, ``[1 + answer, vocab]``, by the whole model."""
    found = [pixels.processed(part) for part in prompt if isinstance(part, int)]
    tokens: list[int] = []
    for part in prompt:
        if isinstance(part, int):
            grid = pixels.processed(part)["image_grid_thw"][0]
            part = [IMAGE_TOKEN] * (int(grid.prod()) // 4)
        tokens += part
    ids = torch.tensor([tokens + answer])
    images = {}
    if found:
        images = {
            **{name: torch.cat([each[name] for each in found]) for name in ("pixel_values", "image_grid_thw")},
            "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
        }
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **images).logits
    return logits[0, len(tokens) - 1 :]


def their_log_probs(model: Any, prompt: tuple[Any, ...], answer: list[int], pixels: Drawn) -> Tensor:
    """Of the answer's tokens, ``[tokens]``."""
    logits = their_logits(model, prompt, answer, pixels)[:-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def build(world, folder: Path, layout: ParallelLayout) -> tuple[Transformer, Any]:
    """This rank's part of the language model with the weights of the directory."""
    source = open_model(folder)
    mesh, groups = place(world, layout)
    built = build_transformer(source.model, layout, groups, world.device, vocab_size=VOCAB)
    for name, (local, part) in local_shards(built, model_spec(source.model), mesh, world.rank).items():
        local.zero_()
        local[inner_of(part)] = source.read(name).float()[outer_of(part)]
    return built, groups


def log_probs(world, folder: Path, layouts: list[str]) -> dict[str, list[list[float]]]:
    """Layout -> of each answer, on the last stage."""
    found: dict[str, list[list[float]]] = {}
    reader, pixels = reader_of(folder), Drawn(folder)
    prompts = [our_tokens(prompt, pixels) for prompt in PROMPTS]
    sequences = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, ANSWERS, strict=True)]
    for text in layouts:
        layout = LAYOUTS[text]
        model, groups = build(world, folder, layout)
        model.read_images(reader)
        lengths = [len(prompt) for prompt in prompts]
        batch = pack(list(range(len(prompts))), sequences, lengths, world.device, groups.cp, reader)

        def compute(output: Tensor, part: MicroBatch, groups: Any = groups) -> Tensor:
            return part.gathered(vocab_parallel_log_probs(output, part.targets, group=groups.tp, vocab_size=VOCAB)[0])

        for values in forward_only(model, groups, [batch], compute):
            found[text] = [each.tolist() for each in values.split([len(answer) for answer in ANSWERS])]
    return found


NUM_NEW = 6


def greedy_texts(world, folder: Path, layouts: list[str]) -> dict[str, list[list[int]]]:
    """Layout -> what the engine generates behind each prompt, several at a time, in pieces."""
    found: dict[str, list[list[int]]] = {}
    reader, pixels = reader_of(folder), Drawn(folder)
    params = SamplingParams(max_new_tokens=NUM_NEW, greedy=True)
    requests = [
        Request(prompt=torch.tensor(our_tokens(prompt, pixels)), params=params, prompt_index=index, index=0)
        for index, prompt in enumerate(PROMPTS)
    ]
    for text in layouts:
        model, groups = build(world, folder, LAYOUTS[text])
        model.read_images(reader)
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=1, max_concurrent=3)
        responses = engine.generate(requests)
        assert [each.finish for each in responses] == ["length"] * len(requests), [each.error for each in responses]
        found[text] = [each.tokens.tolist() for each in responses]
    return found


def their_text(model: Any, prompt: tuple[Any, ...], pixels: Drawn) -> list[int]:
    tokens: list[int] = []
    for _ in range(NUM_NEW):
        tokens.append(int(their_logits(model, prompt, tokens, pixels)[-1].argmax()))
    return tokens


@pytest.mark.parametrize(
    "name",
    ["Qwen2_5_VL", "Qwen3VL", "Qwen3_5", *(pytest.param(f"{each}Moe", marks=pytest.mark.slow) for each in MIXED)],
)
def test_images_are_what_transformers_sees(tmp_path: Path, name: str) -> None:
    model = write_vision_model(tmp_path, name, max_position_embeddings=128)
    expected = [
        their_log_probs(model, prompt, answer, Drawn(tmp_path)) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    texts = [their_text(model, prompt, Drawn(tmp_path)) for prompt in PROMPTS]
    for found_texts in (
        *run_ranks(greedy_texts, 1, tmp_path, ["tp1"]),
        *run_ranks(greedy_texts, 2, tmp_path, ["tp2", "pp2"]),
    ):
        for text in found_texts.values():
            assert text == texts
    (alone,) = run_ranks(log_probs, 1, tmp_path, ["tp1"])
    # Linear attention goes through a sequence token by token.
    layouts = [text for text in LAYOUTS if text != "tp1" and not (text == "cp2" and "Qwen3_5" in name)]
    found = [alone, *run_ranks(log_probs, 2, tmp_path, layouts)]
    assert {text for each in found for text in each} == {"tp1", *layouts}
    for rank in found:
        for text, values in rank.items():
            for index, (ours, theirs) in enumerate(zip(values, expected, strict=True)):
                np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=f"{text}, sample {index}")

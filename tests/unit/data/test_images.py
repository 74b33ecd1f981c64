"""Rows with images: their places in messages, their tokens, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config.data import DataConfig, DataSourceConfig
from hybridflow.data.images import FIRST_ID, image_ids, numbers_of, places_of, row_and_which, source_and_row
from hybridflow.data.problems import open_problems
from hybridflow.data.prompts import Example, prompt_tokens
from hybridflow.data.shaping import Shape, read_examples
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.errors import ConfigError, DataError
from hybridflow.families.images import ImageSettings, image_settings
from hybridflow.families.vision import ORIGIN
from tests.support.hf_models import write_tokenizer
from tests.support.recipes import POLICY, SEES, write_config

MARK, TOKEN = "<|image|>", 40
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<|image|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
)
SETTINGS = ImageSettings(path="", token_id=TOKEN, side=8, min_pixels=64, max_pixels=4096, axes=(0, 1, 2), num_deep=0)
SIZES = {"wide.png": (30, 14), "tall.png": (8, 50), "large.png": (200, 100)}
"""Width and height of each file, in pixels."""
GRIDS = {"wide.png": (2, 4), "tall.png": (6, 1), "large.png": (5, 11)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("images")
    for name, (width, height) in SIZES.items():
        PIL.Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(path / name)
    PIL.Image.fromarray(np.zeros((201, 1, 3), np.uint8)).save(path / "line.png")
    os.mkfifo(path / "pipe")
    write_tokenizer(path / "model", more=[MARK])
    return path


def shape_in(folder: Path, **changes: Any) -> Shape:
    known = {
        "template": TEMPLATE,
        "tokenizer": str(folder / "model/tokenizer.json"),
        "images": SETTINGS,
        "needs_answer": False,
    }
    return Shape(**{"data": DataConfig(images_field="images"), "kind": "problems", **known, **changes})


def example_of(folder: Path, row: dict[str, Any], **changes: Any) -> Example:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row))
    (example,) = read_examples(DataSourceConfig(path=str(path)), shape_in(folder, **changes))
    return example


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


PART, TEXT = {"type": "image"}, {"type": "text", "text": "2"}
ONE, TWO = "{}/wide.png", "{}/tall.png"
FORMS: dict[str, tuple[Any, Any, str, int]] = {
    "marks": (user("1<image>2<image>"), [ONE, TWO], f"1{MARK}2{MARK}", 2),
    "parts": (user([{"type": "text", "text": "1"}, PART, {"type": "text", "text": "2"}]), [ONE], f"1{MARK}2", 1),
    "parts before marks": (user([PART, {"type": "text", "text": "<image>"}]), [ONE], f"{MARK}<image>", 1),
    "in front": (user("12"), [ONE, TWO], f"{MARK}{MARK}12", 2),
    "in front of the user": ([{"role": "system", "content": "0"}, *user("1")], [ONE], f"0{MARK}1", 1),
    "one": (user("1"), ONE, f"{MARK}1", 1),
    "named in parts": (user([{**PART, "image": ONE}, {"type": "text", "text": "3"}]), None, f"{MARK}3", 1),
    "as OpenAI's": (user([{"type": "image_url", "image_url": {"url": ONE}}]), None, MARK, 1),
    "as an address": (user("1"), ["file://" + ONE], f"{MARK}1", 1),
    "as datasets has it": (user("1"), [{"bytes": None, "path": ONE}], f"{MARK}1", 1),
    "as datasets has it in a part": (user([{**PART, "image": {"bytes": None, "path": ONE}}]), None, MARK, 1),
    "none": (user("1<image>"), None, "1<image>", 0),
    "an empty list": (user("1"), [], "1", 0),
}


def put_in(value: Any, folder: Path) -> Any:
    return json.loads(json.dumps(value).replace("{}", str(folder)))


@pytest.mark.parametrize("name", FORMS)
def test_places_of_images(folder: Path, name: str) -> None:
    messages, images, prompt, count = FORMS[name]
    row = {"messages": put_in(messages, folder), **({} if images is None else {"images": put_in(images, folder)})}
    example = example_of(folder, row)
    assert example.prompt == prompt
    assert [each.grid for each in example.images] == [GRIDS["wide.png"], GRIDS["tall.png"]][:count]
    tokenizer = open_tokenizer(folder / "model")
    tokens = prompt_tokens(replace(example, row_number=5), tokenizer)
    found = [token for token in tokens if token >= FIRST_ID]
    assert len(found) == sum(each.num_tokens for each in example.images)
    whose = [*[(5, 0)] * 8, *[(5, 1)] * 6]
    assert [row_and_which(numbers_of(token)) for token in found] == whose[: len(found)]
    assert [places_of(token) for token in found[:8]] == [*range(8)][: len(found)]
    text = [token for token in tokens if token < FIRST_ID]
    assert text == [token for token in tokenizer.encode(prompt) if token != TOKEN]


def test_bytes_in_tables_and_in_text(folder: Path, tmp_path: Path) -> None:
    content = (folder / "large.png").read_bytes()
    jpeg = io.BytesIO()
    PIL.Image.open(folder / "wide.png").save(jpeg, "JPEG")
    given = (content, jpeg.getvalue())
    rows = [{"messages": user("1"), "images": [{"bytes": each, "path": "x"}], "answer": b"BM"} for each in given]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = list(read_examples(DataSourceConfig(path=str(tmp_path / "rows.parquet")), shape_in(folder)))
    assert [each.images[0].grid for each in found] == [GRIDS["large.png"], GRIDS["wide.png"]]
    assert [each.answer for each in found] == ["BM", "BM"]
    assert found[0].images[0].open().size == SIZES["large.png"]
    text = "data:image/png;base64," + base64.b64encode(content).decode()
    assert example_of(folder, {"messages": user("1"), "images": text}).images[0].grid == GRIDS["large.png"]


def test_directories_that_datasets_has_saved(folder: Path, tmp_path: Path) -> None:
    """Their images, one or several, are files there, and pixels to who reads a row."""
    rows = [{"prompt": user("1"), "images": [put_in(ONE, folder)], "one": put_in(TWO, folder)}]
    found = datasets.Dataset.from_list(rows).cast_column("one", datasets.Image())
    found.cast_column("images", [datasets.Image()]).save_to_disk(tmp_path / "saved")
    for name, grid in (("images", GRIDS["wide.png"]), ("one", GRIDS["tall.png"])):
        shape = shape_in(folder, data=DataConfig(images_field=name))
        (example,) = read_examples(DataSourceConfig(path=str(tmp_path / "saved")), shape)
        assert [each.grid for each in example.images] == [grid]


def test_preferences_that_repeat_the_prompt_with_its_image(folder: Path) -> None:
    """As TRL has them: the prompt is what both conversations begin with."""
    asked = user([PART, {"type": "text", "text": "1"}])
    row = {
        "chosen": [*asked, {"role": "assistant", "content": [TEXT]}],
        "rejected": [*asked, {"role": "assistant", "content": "3"}],
        "images": [put_in(ONE, folder)],
    }
    example = example_of(folder, row, kind="pairs")
    assert example.prompt == f"{MARK}1"
    assert [each.text for each in example.responses] == ["2", "3"]
    assert [each.grid for each in example.images] == [GRIDS["wide.png"]]


def test_numbers_lead_back_to_the_row(folder: Path, tmp_path: Path) -> None:
    """Also of another source, in another epoch."""
    sources = []
    for number, names in enumerate((["wide.png"], ["tall.png", "large.png"])):
        path = tmp_path / f"{number}.jsonl"
        rows = [{"messages": user(f"{row}"), "images": [str(folder / name) for name in names]} for row in range(3)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append(DataSourceConfig(path=str(path)))
    shape = shape_in(folder, max_context=200, max_new_tokens=1)
    problems = open_problems(sources, shape, open_tokenizer(folder / "model"), tmp_path / "stores", seed=3)
    seen = set()
    # Whatever becomes of the files, all ranks know what was found when the rows were prepared.
    for name in SIZES:
        (folder / name).rename(folder / f"away-{name}")
    for prompt_index in range(14):
        images = problems.example(prompt_index).images
        tokens = [token for token in problems.prompt(prompt_index) if token >= FIRST_ID]
        numbers = dict.fromkeys(map(numbers_of, tokens))
        ids = [image_ids(number, each.num_tokens) for number, each in zip(numbers, images, strict=True)]
        assert [token for part in ids for token in part] == tokens
        (row,) = {row_and_which(numbers_of(token))[0] for token in tokens}
        assert problems.images(row) == images
        seen.add(source_and_row(row))
        assert problems.example(prompt_index).row.keys() == {"messages", "images", "prompt"}
    for name in SIZES:
        (folder / f"away-{name}").rename(folder / name)
    assert seen == {(source, row) for source in (0, 1) for row in range(3)}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more images than marks": ({"messages": user("<image>"), "images": [ONE, TWO]}, "2 images, and 1 places"),
    "fewer images than marks": ({"messages": user("<image><image>"), "images": [ONE]}, "1 images, and 2 places"),
    "a text without a place": (
        {"prompt": "1+1", "images": [ONE]},
        "1 images, and 0 places.*data.prompt_as_message=true makes",
    ),
    "missing": ({"messages": user("1"), "images": ["{}/none.png"]}, "none.png: cannot be read as an image: .*No such"),
    "no image": ({"messages": user("1"), "images": ["{}/rows.jsonl"]}, "rows.jsonl: cannot be read as an image"),
    "broken bytes": ({"messages": user("1"), "images": ["data:;base64,iVBORw0K"]}, "cannot be read as an image"),
    "no base64": ({"messages": user("1"), "images": ["data:image/png;base64,?"]}, "cannot be read as an image"),
    "on the web": ({"messages": user("1"), "images": ["https://a.b/c.png"]}, "download it, and name the file"),
    "a number": ({"messages": user("1"), "images": [3]}, "found 3, expected the path of an image"),
    "some named": (
        {"messages": user([PART, {**PART, "image": ONE}])},
        "some images are named in messages and others are not",
    ),
    "many": ({"messages": user("1"), "images": [ONE] * 17}, "17 images; expected at most 16"),
    "a part alone": ({"messages": user([PART])}, "1 images in messages, and none in the row's field"),
    "a pipe": ({"messages": user("1"), "images": ["{}/pipe"]}, "pipe: cannot be read as an image: is no regular file"),
    "too long": ({"messages": user("1"), "images": ["{}/line.png"]}, "line.png: 1 x 201 pixels; one side may be at"),
    "a folder": ({"messages": user("1"), "images": ["{}/model"]}, "model: cannot be read as an image: is no regular"),
    "broken numbers": ({"messages": user("1"), "images": ["data:;base64,UDYKNXggNSAyNTUK"]}, "cannot be read as an"),
    "what the assistant draws": (
        {"messages": [*user("1"), {"role": "assistant", "content": [TEXT, PART, TEXT]}], "images": [ONE]},
        "the assistant's last message has an image; what a model writes is text",
    ),
    "a video": ({"messages": user([{"type": "video"}])}, "expected text, or a list of parts of type text or image"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(folder: Path, name: str) -> None:
    row, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        example = example_of(folder, put_in(row, folder))
        prompt_tokens(example, open_tokenizer(folder / "model"))


LEFT_HALF = np.repeat([[True, False]], [4, 12], axis=1).repeat(8, axis=0)
"""Where the pixels of an image of 16 x 8 are dark."""


def of_kind(kind: str) -> tuple[PIL.Image.Image, dict[str, Any]]:
    """Return such an image, and how it is saved."""
    gray = np.where(LEFT_HALF, 0, 255).astype(np.uint8)
    if kind == "16 bits":
        return PIL.Image.fromarray(np.where(LEFT_HALF, 300, 65000).astype(np.uint16)), {}
    if kind == "transparent":
        return PIL.Image.fromarray(np.stack([0 * gray, 0 * gray, 0 * gray, 255 - gray], axis=-1)), {}
    if kind == "a transparent color":
        return PIL.Image.fromarray(np.where(LEFT_HALF, 0, 1).astype(np.uint8)), {"transparency": 1}
    image = PIL.Image.fromarray(gray)
    if kind != "turned by a camera":
        return image.convert(kind), {}
    exif = PIL.Image.Exif()
    exif[PIL.Image.ExifTags.Base.Orientation] = 6
    return image.transpose(PIL.Image.Transpose.ROTATE_90), {"exif": exif}


@pytest.mark.parametrize(
    "kind", ["16 bits", "transparent", "a transparent color", "turned by a camera", "P", "RGBA", "LA", "1", "CMYK"]
)
def test_a_model_sees_what_people_see(folder: Path, tmp_path: Path, kind: str) -> None:
    image, saved = of_kind(kind)
    path = tmp_path / ("image.jpeg" if kind in ("turned by a camera", "CMYK") else "image.png")
    image.save(path, **saved)
    (found,) = example_of(folder, {"messages": user("1"), "images": [str(path)]}).images
    assert found.grid == (1, 2)
    seen = np.asarray(found.open())
    assert seen.shape == (8, 16, 3)
    np.testing.assert_array_equal(seen < 128, LEFT_HALF[..., None].repeat(3, axis=-1))


def test_a_bomb_is_refused(folder: Path, tmp_path: Path) -> None:
    """A small file that says it has more pixels than memory."""
    content = bytearray((folder / "wide.png").read_bytes())
    content[16:24] = (60000).to_bytes(4, "big") * 2
    (tmp_path / "bomb.png").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as an image"):
        example_of(folder, {"messages": user("1"), "images": [str(tmp_path / "bomb.png")]})


def test_without_the_key_prompts_are_text(folder: Path) -> None:
    plain = {"data": DataConfig(), "images": None}
    example = example_of(folder, {"messages": user("<image>1"), "images": ["none.png"]}, **plain)
    assert (example.prompt, example.images) == ("<image>1", ())
    with pytest.raises(DataError, match=re.escape("of messages with images give the field: data.images_field")):
        example_of(folder, {"messages": user([PART])}, **plain)


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 900), height=st.integers(1, 900), side=st.sampled_from([8, 28, 32]), most=st.integers(3, 400)
)
def test_grids_are_those_of_transformers(width: int, height: int, side: int, most: int) -> None:
    known = replace(SETTINGS, side=side, min_pixels=2 * side**2, max_pixels=most * side**2)
    size = {"shortest_edge": known.min_pixels, "longest_edge": known.max_pixels}
    processor = transformers.Qwen2VLImageProcessorPil(patch_size=side // 2, merge_size=2, size=size)
    image = PIL.Image.fromarray(np.zeros((height, width, 3), np.uint8))
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError, match="one side may be at most 200 times the other"):
            known.grid(width, height)
        return
    theirs = processor([image], return_tensors="np")["image_grid_thw"][0] // 2
    assert known.grid(width, height) == tuple(theirs[1:])


def test_settings_of_directories(tmp_path: Path) -> None:
    write_config(tmp_path, SEES)
    with pytest.raises(Exception, match="preprocessor_config.json: cannot be read"):
        image_settings(tmp_path)
    processor = {"patch_size": 16, "merge_size": 2, "min_pixels": 1024, "max_pixels": 65536}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    found = image_settings(tmp_path)
    assert (found.token_id, found.side, found.min_pixels, found.max_pixels, found.num_deep) == (9, 32, 1024, 65536, 1)
    assert found.axes == (0, 1, 2, 0, 1, 2)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**processor, "max_pixels": 2048}))
    assert image_settings(tmp_path).max_pixels == 2048
    assert [image_settings(tmp_path, most).max_pixels for most in (1500, 9999, 3)] == [1500, 2048, 1024]
    write_config(tmp_path, {key: value for key, value in SEES.items() if key != "image_token_id"})
    with pytest.raises(ConfigError, match=r"do not say how images are read \(KeyError: 'image_token_id'\)"):
        image_settings(tmp_path)
    write_config(tmp_path, POLICY)
    with pytest.raises(ConfigError, match="model_type 'llama' does not read images here; expected one of qwen2_5_vl"):
        image_settings(tmp_path)


def test_a_language_model_without_its_directory(tmp_path: Path) -> None:
    """As a checkpoint has it whose original model was moved."""
    write_config(tmp_path / "step/assets", {**SEES, ORIGIN: str(tmp_path / "moved")})
    with pytest.raises(ConfigError, match="moved, which is not there; restore that directory"):
        image_settings(tmp_path / "step")

"""``hybridflow generate`` and ``serve`` on images: what ``transformers`` says to the same pixels, in every layout."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import transformers

import hybridflow.serving.batch
import hybridflow.serving.serve  # noqa: F401  # what ranks import, imported once, before they are forked
from hybridflow.exit_status import DONE, FAILURE, REQUEST
from tests.e2e.commands import Done, fork_ranks
from tests.e2e.test_serve import Client, serve, together
from tests.support.hf_models import IMAGE_TOKEN, write_tokenizer, write_vision_model

MARK = "<|image_pad|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}="
)
SIZES = ((40, 70), (33, 20), (64, 90))
"""Height and width of each image, in pixels."""
NUM_NEW = 8


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*SIZES[number], 3), dtype=np.uint8)


def address(folder: Path, name: str) -> str:
    return "data:image/png;base64," + base64.b64encode((folder / name).read_bytes()).decode()


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


class Theirs:
    """What ``transformers`` says of a text with marks, and of images by their numbers."""

    def __init__(self, folder: Path, model: Any) -> None:
        self._model = model
        self._tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self._processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")

    def inputs(self, prompt: str, images: list[int], max_pixels: int = 4096) -> dict[str, torch.Tensor]:
        if not images:
            return {"input_ids": torch.tensor([self._tokenizer.encode(prompt)])}
        size = {"shortest_edge": 64, "longest_edge": max_pixels}
        drawn = [PIL.Image.fromarray(pixels(number)) for number in images]
        seen = self._processor(drawn, size=size, return_tensors="pt")
        for grid in seen["image_grid_thw"]:
            prompt = prompt.replace(MARK, "<placeholder>" * (int(grid.prod()) // 4), 1)
        ids = torch.tensor([self._tokenizer.encode(prompt.replace("<placeholder>", MARK))])
        return {"input_ids": ids, **seen, "mm_token_type_ids": (ids == IMAGE_TOKEN).int()}

    def text(self, *prompt: Any) -> list[int]:
        inputs = self.inputs(*prompt)
        ones = torch.ones_like(inputs["input_ids"])
        said = self._model.generate(
            **inputs, attention_mask=ones, do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=0, pad_token_id=2
        )
        return said[0, ones.shape[1] :].tolist()

    @torch.no_grad()
    def prompt_log_probs(self, *prompt: Any) -> torch.Tensor:
        inputs = self.inputs(*prompt)
        logits = self._model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits[0]
        return logits[:-1].log_softmax(-1).gather(-1, inputs["input_ids"][0, 1:, None])[:, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answered")
    for number in range(len(SIZES)):
        PIL.Image.fromarray(pixels(number)).save(path / f"{number}.png")
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    model = write_vision_model(folder / "model", "Qwen2_5_VL", seed=1, max_position_embeddings=160)
    write_tokenizer(folder / "model", more=[MARK], chat_template=TEMPLATE)
    return Theirs(folder / "model", model)


def rows_with(folder: Path) -> list[tuple[dict[str, Any], str, list[int]]]:
    """Lines of prompts, each with what the model is to read: a text with marks, and images."""
    one, other = ({"type": "image", "image": name} for name in ("1.png", "2.png"))
    parts = [text("3+"), one, text("4"), other, text("1")]
    return [
        ({"messages": user("<image>1+1"), "images": ["0.png"]}, f"{MARK}1+1=", [0]),
        ({"messages": user("<image>1+1"), "images": ["2.png"]}, f"{MARK}1+1=", [2]),
        ({"messages": user(parts)}, f"3+{MARK}4{MARK}1=", [1, 2]),
        ({"prompt": user("2+2")}, "2+2=", []),
        ({"prompt": f"5{MARK}+1", "images": address(folder, "0.png")}, f"5{MARK}+1", [0]),
        ({"prompt_ids": [7, IMAGE_TOKEN, 8], "images": {"path": "1.png", "bytes": None}}, "", [1]),
    ]


ARGUMENTS = ("generate", "--model", "model", "--greedy", "--max-new-tokens", str(NUM_NEW), "--max-concurrent", "3")


def generate(folder: Path, rows: list[dict[str, Any]], *more: str, num_ranks: int = 1) -> tuple[Done, list[Any]]:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*ARGUMENTS, "--prompts", "prompts.jsonl", "--out", "out.jsonl", "--force", *more]
    (folder / "out.jsonl").unlink(missing_ok=True)
    done = fork_ranks(words, folder, num_ranks=num_ranks)
    there = (folder / "out.jsonl").exists()
    return done, [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()] if there else []


@pytest.mark.parametrize("layout", ["pp2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp2", "dp2"))])
def test_texts_are_those_of_transformers(folder: Path, theirs: Theirs, layout: str) -> None:
    asked = rows_with(folder)
    more = ("--images-field", "images", "--layout", layout, "--prompt-log-probs")
    done, rows = generate(folder, [row for row, _, _ in asked], *more, num_ranks=2)
    assert (done.codes, done.err) == ((DONE, DONE), ""), done.err
    said = []
    for row, (given, prompt, images) in zip(rows, asked, strict=True):
        if "prompt_ids" in given:
            prompt = theirs._tokenizer.decode(given["prompt_ids"])
        said.append(theirs.text(prompt, images))
        assert row["token_ids"] == said[-1], given
        expected = theirs.prompt_log_probs(prompt, images)
        assert len(row["prompt_log_probs"]) == len(expected)
        assert (torch.tensor(row["prompt_log_probs"]) - expected).abs().max() < 2e-5
    assert said[0] != said[1], "the images make no difference"


def test_images_are_made_smaller_and_what_is_wrong_with_them_is_told(folder: Path, theirs: Theirs) -> None:
    (folder / "torn.png").write_bytes((folder / "2.png").read_bytes()[:-2000])
    asked = {"messages": user("1"), "images": ["2.png"]}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**asked, "images": ["none.png"]}, "images: none.png: cannot be read as an image"),
        ({**asked, "images": ["0.png"] * 17}, "images: 17 images; expected at most 16"),
        ({"prompt": "1+1=", "images": ["0.png"]}, "the prompt: 1 images, and 0 places"),
        ({"prompt": user([{"type": "image"}])}, "messages: 1 images in messages, and none in the row's field"),
    ]
    more = ("--images-field", "images", "--image-max-pixels", "1024")
    done, rows = generate(folder, [asked, *(row for row, _ in wrong)], *more)
    assert done.codes == (FAILURE,)
    assert rows[0]["token_ids"] == theirs.text(f"{MARK}1=", [2], 1024)
    for row, (_, words) in zip(rows[1:], wrong, strict=True):
        assert words in row["error"], row
    done, _ = generate(folder, [asked, {**asked, "images": ["torn.png"]}], "--images-field", "images", "--dry-run")
    assert done.codes == (FAILURE,) and "2 prompts, 1 of them bad" in done.out and "weights and images" in done.out
    assert "prompts.jsonl:2: torn.png: cannot be read as an image" in done.out


def test_who_forgets_the_option_is_told_of_it(folder: Path, theirs: Theirs) -> None:
    done, rows = generate(folder, [{"messages": user("1+1"), "images": ["0.png"]}])
    assert done.codes == (DONE,) and "--images-field images gives the model the images of its rows, too" in done.out
    assert rows[0]["token_ids"] == theirs.text("1+1=", [])
    done, rows = generate(folder, [{"messages": user([{"type": "image", "image": "0.png"}])}])
    assert done.codes == (FAILURE,) and "--images-field images gives them to a model that reads" in rows[0]["error"]
    done, _ = generate(folder, [{"messages": user("1")}], "--image-max-pixels", "9")
    assert done.codes == (REQUEST,) and "--image-max-pixels: is for images; give --images-field too" in done.err


def chat(folder: Path, *parts: Any, **more: Any) -> dict[str, Any]:
    """A request with images by the names of their files."""
    content = [
        {"type": "image_url", "image_url": {"url": address(folder, each)}} if isinstance(each, str) else each
        for each in parts
    ]
    return {"messages": user(content), "temperature": 0, "max_tokens": NUM_NEW, **more}


@pytest.mark.parametrize(
    "layout", ["dp1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp2", "pp2", "dp2"))]
)
def test_a_server_answers_as_transformers_does(folder: Path, theirs: Theirs, layout: str) -> None:
    """Several clients at a time, whole and in pieces; a body as large as no text may be; and a client to be refused."""
    noise = np.random.default_rng(9).integers(0, 256, (1750, 1750, 3), dtype=np.uint8)
    PIL.Image.fromarray(noise).save(folder / "large.png", compress_level=0)
    bodies = [
        chat(folder, "0.png", text("1+1")),
        chat(folder, text("3+"), "1.png", text("4"), "2.png", text("1"), n=2),
        chat(folder, text("2+2")),
        chat(folder, "2.png", text("1+1")),
        chat(folder, "large.png", text("1")),
    ]
    prompts = [(f"{MARK}1+1=", [0]), (f"3+{MARK}4{MARK}1=", [1, 2]), ("2+2=", []), (f"{MARK}1+1=", [2])]

    def ask_all(client: Client) -> Any:
        path = "/v1/chat/completions"
        answers = together([lambda body=body: client.post(path, **body) for body in [*bodies, bodies[0]]])
        streamed = client.post(path, **bodies[1], stream=True, stream_options={"include_usage": True})
        secret = {"type": "image_url", "image_url": {"url": str(folder / "0.png")}}
        return answers, streamed, client.post(path, **chat(folder, secret)), client.post(path, **bodies[0])

    more = ("--layout", layout, "--image-max-pixels", "2304")
    (answers, streamed, refused, again), _ = serve(folder, ask_all, *more, num_ranks=int(layout[-1]))
    assert [status for status, _ in answers] == [200] * 6, answers
    assert refused[0] == 400 and "neither fetches nor opens" in refused[1]["error"]["message"]
    for (_, answer), prompt in zip(answers, prompts, strict=False):
        expected = theirs.text(*prompt, 2304)
        assert all(choice["token_ids"] == expected for choice in answer["choices"]), prompt
        assert answer["usage"]["prompt_tokens"] == theirs.inputs(*prompt, 2304)["input_ids"].shape[1]
    assert answers[5][1]["choices"] == again[1]["choices"] == answers[0][1]["choices"]
    assert answers[4][1]["usage"]["prompt_tokens"] == 36 + 2, "6 x 6 tokens of 8 x 8 pixels are 2304 pixels"
    events = [json.loads(line[6:]) for line in streamed[1].split("\n\n")[:-2]]
    assert streamed[0] == 200 and events[-1]["usage"] == answers[1][1]["usage"]
    pieces = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
    assert (
        "".join(each["delta"].get("content", "") for each in pieces)
        == answers[1][1]["choices"][0]["message"]["content"]
    )

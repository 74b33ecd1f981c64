"""Images in requests: what a server takes, and what it refuses of clients that nobody knows."""

from __future__ import annotations

import argparse
import base64
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from hybridflow.data.images import FIRST_ID, Image, numbers_of, row_and_which
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.families.images import ImageSettings
from hybridflow.serving import desk as module
from hybridflow.serving.api import ApiError, Ask, Sample, Served, read_ask, usage
from hybridflow.serving.desk import Desk
from hybridflow.serving.images import MOST_PIXELS, Looker
from hybridflow.serving.serve import _Replica, _settings
from tests.support.hf_models import write_model, write_tokenizer, write_vision_model

MARK, TOKEN = "<|image|>", 40
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<|image|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
)
SETTINGS = ImageSettings(path="", token_id=TOKEN, side=8, min_pixels=64, max_pixels=4096, axes=(0, 1, 2), num_deep=0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    write_tokenizer(folder, more=[MARK], chat_template=TEMPLATE)
    looker = Looker(SETTINGS)
    yield Served(name="m", tokenizer=open_tokenizer(folder), vocab_size=45, max_context=300, looker=looker)
    looker.close()


def saved(pixels: Any, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(np.asarray(pixels, np.uint8)).save(file, kind, **how)
    return file.getvalue()


def blank(height: int, width: int, kind: str = "PNG", **how: Any) -> bytes:
    return saved(np.zeros((height, width)), kind, **how)


def url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()


def part(address: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address, "detail": "auto"}}


def ask(served: Served, *parts: Any, **more: Any) -> Ask:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, **more}
    return read_ask(json.dumps(body).encode(), served, is_chat=True)


ONE = {"type": "text", "text": "1"}


def test_images_of_a_request_are_tokens_of_its_prompt(served: Served) -> None:
    """16 x 24 pixels are 2 x 3 tokens of 8 x 8, and 40 x 8 are 5."""
    jpeg, webp = blank(40, 8, "JPEG"), blank(16, 24, "WEBP")
    asked = ask(served, ONE, part(url(blank(16, 24))), ONE, part(url(jpeg, "jpeg")))
    assert served.tokenizer is not None
    (one,) = served.tokenizer.encode("1")
    (prompt,) = asked.prompts
    assert [token if token < FIRST_ID else None for token in prompt] == [one, *[None] * 6, one, *[None] * 5]
    assert [row_and_which(numbers_of(prompt[place])) for place in (1, 8)] == [
        (asked.image_row, 0),
        (asked.image_row, 1),
    ]
    assert [each.grid for each in asked.images] == [(2, 3), (5, 1)]
    assert usage(asked, [Sample(tokens=[1], log_probs=[], prompt_log_probs=None, finish="stop", error=None)]) == {
        "prompt_tokens": 13,
        "completion_tokens": 1,
        "total_tokens": 14,
    }
    # Another request with the same image has other ids: a rank keeps what it computed by them.
    again = ask(served, part(url(webp, "webp")))
    assert again.image_row != asked.image_row and [each.grid for each in again.images] == [(2, 3)]
    plain = ask(served, {"type": "image_url", "image_url": url(webp, "webp")})
    assert [each.grid for each in plain.images] == [(2, 3)]


def bomb() -> bytes:
    """A small file that says it has more pixels than memory."""
    content = bytearray(blank(9, 9))
    content[16:24] = (60000).to_bytes(4, "big") * 2
    return bytes(content)


def endless() -> bytes:
    """A photo whose last scan comes again and again: small, and read for minutes."""
    noise = np.random.default_rng(0).integers(0, 256, (3000, 3000))
    content = saved(noise // 64 * 64, "JPEG", quality=1, progressive=True)
    scan = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + scan * 300 + content[-2:]


REFUSED: dict[str, tuple[Any, str]] = {
    "on the web": (part("https://a.b/c.png"), "found the image 'https://a.b/c.png', which this server neither fetches"),
    "a file": (part("/etc/passwd"), "neither fetches nor opens; send the file itself"),
    "a file's address": (part("file:///etc/passwd"), "neither fetches nor opens"),
    "another file beside": ({"type": "image", "image": "/etc/passwd"}, "neither fetches nor opens"),
    "a path for an address": ({**part("/a.png"), "path": "/a.png"}, "neither fetches nor opens"),
    "no address": ({"type": "image_url"}, "neither fetches nor opens"),
    "a page": (part("data:text/html;base64,AAAA"), "neither fetches nor opens"),
    "nothing inside": (part("data:image/png;base64,"), "cannot be read as an image"),
    "no base64": (part("data:image/png;base64,??"), "cannot be read as an image"),
    "torn": (part(url(saved(np.arange(90000).reshape(300, 300) % 251)[:-900])), "cannot be read as an image"),
    "a program of PostScript": (part(url(saved(np.zeros((9, 9, 3)), "EPS"))), "cannot be read as an image"),
    "another format": (part(url(blank(9, 9, "TIFF"))), "cannot be read as an image"),
    "a bomb": (part(url(bomb())), "cannot be read as an image"),
    "a long line": (part(url(blank(1, 300))), "300 x 1 pixels; one side may be at most 200 times the other"),
    "more pixels than are taken": (
        part(url(blank(6000, 6000))),
        f"36000000 pixels in all; expected at most {MOST_PIXELS}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(served: Served, name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(ApiError, match=message) as caught:
        ask(served, ONE, given)
    assert caught.value.status == 400
    # Those of others are read all the same.
    assert len(ask(served, part(url(blank(16, 24)))).images) == 1


@pytest.mark.slow
def test_a_photo_that_is_read_for_minutes_is_refused(served: Served) -> None:
    with pytest.raises(ApiError, match="cannot be read within 4 s and 1024 MiB; make them smaller") as caught:
        ask(served, part(url(endless(), "jpeg")))
    assert caught.value.status == 400
    assert len(ask(served, part(url(blank(16, 24)))).images) == 1


def test_many_images_and_their_sum(served: Served) -> None:
    with pytest.raises(ApiError, match="17 images; expected at most 16"):
        ask(served, *[part(url(blank(8, 8)))] * 17)
    with pytest.raises(ApiError, match="images of 48000000 pixels in all"):
        ask(served, *[part(url(blank(4000, 4000)))] * 3)
    with pytest.raises(ApiError, match="exceeds the context") as caught:
        ask(served, *[part(url(blank(64, 64)))] * 5)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ApiError, match="1 images, and 2 places for them"):
        ask(served, {"type": "text", "text": MARK}, part(url(blank(8, 8))))
    with pytest.raises(ApiError, match="have images, and the model is served without; send text"):
        ask(replace(served, looker=None), part(url(blank(8, 8))))


def test_open_requests_have_so_many_bytes_of_images(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ask(served, part(url(blank(16, 24))))
    monkeypatch.setattr(module, "_MOST_IMAGE_BYTES", 2 * len(asked.images[0].source))
    desk = Desk(1, 8)
    tickets = [desk.submit(asked, print) for _ in range(2)]
    with pytest.raises(ApiError, match="bytes of images already") as caught:
        desk.submit(asked, print)
    assert caught.value.status == 429
    desk.submit(ask(served, ONE), print)
    desk.leave(tickets[0])
    desk.submit(asked, print)
    command = desk.take(0.0)[0]
    assert json.loads(json.dumps(command["images"])) == [[asked.images[0].source, [2, 3], TOKEN]]


def test_a_server_opens_no_file_that_a_client_names(served: Served, tmp_path: Path) -> None:
    """Whatever stands beside the address: what training reads of a part is not read of a client's."""
    (tmp_path / "secret.png").write_bytes(blank(16, 24))
    for key in ("image", "url", "path", "bytes"):
        given = {**part(url(blank(8, 8))), key: str(tmp_path / "secret.png")}
        assert [each.grid for each in ask(served, given).images] == [(1, 1)]
    # What is an address in capitals to a client is no name of a file here.
    assert [each.grid for each in ask(served, part("DATA" + url(blank(8, 8))[4:])).images] == [(1, 1)]


def test_what_transformers_cannot_make_is_served_as_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its images alone are lacking, unless they are asked for."""
    write_vision_model(tmp_path / "sees", "Qwen2_5_VL")
    config = json.loads((tmp_path / "sees/config.json").read_text())
    config["vision_config"]["depth"] = "many"
    (tmp_path / "sees/config.json").write_text(json.dumps(config))
    arguments = argparse.Namespace(model=tmp_path / "sees", image_max_pixels=None, max_context=None, dtype=None)
    assert _settings(arguments, is_teller=True) is None
    assert "hybridflow: messages are text alone: " in capfd.readouterr().err
    arguments.image_max_pixels = 4096
    with pytest.raises(ConfigError, match="vision_config: transformers .* cannot make the vision tower"):
        _settings(arguments, is_teller=True)
    write_model(tmp_path / "reads")
    arguments.model = tmp_path / "reads"
    with pytest.raises(ConfigError, match="model_type 'llama' does not read images here"):
        _settings(arguments, is_teller=True)
    arguments.image_max_pixels = None
    assert _settings(arguments, is_teller=True) is None


def test_images_are_kept_as_long_as_a_sample_of_their_request_runs() -> None:
    session = argparse.Namespace(is_idle=True, add=list, cancel=list)
    placed = argparse.Namespace(engine=argparse.Namespace(open=lambda: session), dp=0, images={})
    replica = _Replica(placed)  # type: ignore[arg-type]
    common = {"do": "add", "replica": 0, "params": {"max_new_tokens": 4}, "prompt_index": 0, "is_streamed": False}
    seen = {**common, "ids": [1, 2], "prompt": [FIRST_ID], "image_row": 7}
    replica.step([seen, {**common, "ids": [3], "prompt": [5], "image_row": None}], [[7, [["data:", [1, 2], TOKEN]]]])
    assert placed.images == {7: (Image("data:", (1, 2), TOKEN),)}
    for ids, rows in (([1], {7}), ([3], {7}), ([2], set())):
        replica.step([{"do": "cancel", "ids": ids}], [])
        assert placed.images.keys() == rows

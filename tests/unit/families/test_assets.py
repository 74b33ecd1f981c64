"""Small files of others: what is no regular file, too large, or a link to another file is refused."""

import json
import os
import re
import subprocess
import sys

import pytest

from hybridflow.errors import CheckpointError
from hybridflow.exit_status import SOURCE, exit_status
from hybridflow.families.assets import ASSETS, asset_names, read_assets, read_json
from hybridflow.families.weight_files import find_weight_files
from hybridflow.foreign import MAX_SMALL_BYTES, open_regular
from tests.support.complaints import complains_apart


def test_links_of_the_cache_of_hugging_face_are_followed(tmp_path):
    """``snapshots/REVISION/NAME`` leads to ``blobs/HASH``, also from a folder within the revision."""
    cache = tmp_path / "models--org--name"
    revision = cache / "snapshots/0a1b"
    (revision / "original").mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs/77").write_bytes(b"{}")
    (revision / "config.json").symlink_to("../../blobs/77")
    (revision / "original/config.json").symlink_to("../../../blobs/77")
    (tmp_path / "model").symlink_to(revision)
    for folder in (revision, revision / "original", tmp_path / "model"):
        assert read_assets(folder) == {"config.json": b"{}"}


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_link_to_another_file_is_not_copied(tmp_path, has_cache):
    private = tmp_path / "private"
    private.write_text("secret")
    folder = tmp_path / "name/snapshots/0a1b" if has_cache else tmp_path / "model"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").symlink_to(private)
    if has_cache:
        # What looks like a cache, with a link in the place of the blob.
        (tmp_path / "name/blobs").mkdir()
        (tmp_path / "name/blobs/77").symlink_to(private)
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.json").symlink_to("../../blobs/77")
    with pytest.raises(CheckpointError) as e:
        read_assets(folder)
    assert re.fullmatch(
        r"\S+/tokenizer\.json: is a symbolic link to .*, whose content would be copied; expected a file: put the file "
        r"itself there \(cp -rL copies a directory so\)",
        str(e.value),
    )
    assert exit_status(e.value) == SOURCE
    assert read_assets(folder, follows_links=True) == {"tokenizer.json": b"secret"}


@pytest.mark.parametrize("target", ["nothing", "tokenizer.json"])
def test_a_link_that_leads_nowhere_is_a_lost_file(tmp_path, target):
    """It is not passed over, as if the model never had the file; a loop leads nowhere too."""
    (tmp_path / "tokenizer.json").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is a symbolic link to"):
        read_assets(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*tokenizer\.json"):
        read_assets(tmp_path, follows_links=True)
    with pytest.raises(CheckpointError, match=r"found tokenizer\.json \(a link to nothing\), expected"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("first", "own", "names"),
    [
        (b"a", None, ["default", "z"]),
        (b"a", "of the settings", ["default", "z"]),
        (None, "of the settings", ["default", "z"]),
        (None, None, ["z"]),
    ],
)
def test_several_chat_templates_become_a_list(tmp_path, first, own, names):
    """As transformers takes them: the file goes before the settings."""
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/z.jinja").write_bytes(b"z")
    if first is not None:
        (tmp_path / "chat_template.jinja").write_bytes(first)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": own, "eos_token": "e"}))
    found = read_assets(tmp_path, asset_names(tmp_path))
    assert [*found] == ["tokenizer_config.json"]
    values = json.loads(found["tokenizer_config.json"])
    texts = {"default": "a" if first else own, "z": "z"}
    assert values == {"eos_token": "e", "chat_template": [{"name": name, "template": texts[name]} for name in names]}


@pytest.mark.parametrize("config", [None, b"", b"[", b"[1]", b"{}", b'{"auto_map": {}}'])
def test_code_travels_only_where_the_tokenizer_names_some(tmp_path, config):
    (tmp_path / "tokenization_own.py").touch()
    (tmp_path / "not-a-module.py").touch()
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_bytes(config)
    assert asset_names(tmp_path) == ASSETS
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_own.Own", null]}}')
    assert asset_names(tmp_path) == (*ASSETS, "tokenization_own.py")


def test_large_files_are_not_read(tmp_path):
    with (tmp_path / "merges.txt").open("wb") as file:
        file.truncate(30 << 30)
    for call in (lambda: read_assets(tmp_path), lambda: read_json(tmp_path / "merges.txt")):
        complains_apart(call, ["merges.txt", f"has {30 << 30} bytes, more than {MAX_SMALL_BYTES}"], max_bytes=32 << 20)


def test_pipes_and_devices_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert read_assets(tmp_path) == {}
    complains_apart(lambda: read_json(tmp_path / "config.json"), ["is not a regular file", "config.json"])
    for path in ("/dev/zero", "/proc", tmp_path):
        with pytest.raises(OSError, match="regular file|directory"):
            open_regular(path)


def test_a_limit_of_time_on_a_core_leaves_all_of_it():
    """On a slow machine a process has used much of a second before it is first asked."""
    program = (
        "import resource, time; from hybridflow.foreign import limit_cpu; limit_cpu(1); "
        "print(resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # What it takes to look counts too.
    assert 0.99 < float(done.stdout) <= 2

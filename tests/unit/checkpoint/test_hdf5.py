"""HDF5: what plain h5py reads, bit-exact both ways, and everything that is wrong is refused with its place."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.checkpoint.formats.hdf5 import HDF5Source, HDF5Writer
from hybridflow.checkpoint.formats.registry import open_source
from hybridflow.checkpoint.tensor_file import entry_of
from hybridflow.data.arrays import read_texts
from hybridflow.errors import CheckpointError, LayoutError
from hybridflow.layout.parallel_layout import ParallelLayout
from tests.support.checkpoint_formats import SMALL, MemorySource, assert_same, in_bf16
from tests.support.complaints import complains_apart
from tests.support.conversions import convert
from tests.support.disks import no_room
from tests.support.row_files import write_repeated_text

MIXTURE = replace(SMALL, num_experts=4, qkv_bias=False, qk_norm=True, dtype="bf16")
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
QKV_PATH = "/weights/decoder/layers/1/self_attention/linear_qkv/weight"


def written(tmp_path, model=SMALL, layout=None, dtype=None, **other):
    source = MemorySource(model, **other)
    cut = None if layout is None else ParallelLayout.parse(layout)
    return source, convert(source, "hdf5", tmp_path / ("out" if layout else "out.h5"), layout=cut, dtype=dtype)


@pytest.mark.parametrize("layout", [None, "tp1", "tp2.pp2", "tp2.dp2.ep2.etp1"])
@pytest.mark.parametrize("model", [SMALL, in_bf16(SMALL), MIXTURE], ids=["fp32", "bf16", "mixture"])
def test_comes_back_bit_for_bit(tmp_path, model, layout):
    if layout and "ep" in layout and model is not MIXTURE:
        with pytest.raises(LayoutError, match="no experts"):
            written(tmp_path, model, layout)
        return
    source, out = written(tmp_path, model, layout)
    found = open_source(out)
    assert isinstance(found, HDF5Source)
    assert (found.model, found.family, found.has_value_head) == (model, "qwen2", False)
    assert found.layout == (None if layout is None else str(ParallelLayout.parse(layout)))
    assert found.assets() == source.assets()
    assert_same(found, source.values)


def test_a_value_head_and_another_dtype(tmp_path):
    source, out = written(tmp_path, SMALL, None, "bf16", has_value_head=True)
    found = open_source(out)
    assert found.has_value_head and found.model.dtype == "bf16"
    assert_same(found, {name: value.bfloat16() for name, value in source.values.items()})


@pytest.mark.parametrize("layout", [None, "tp2.pp2"])
def test_plain_h5py_reads_the_values(tmp_path, layout):
    source, out = written(tmp_path, in_bf16(SMALL), layout)
    if layout:
        moved = tmp_path / "elsewhere"
        out = shutil.move(out, moved) / "model.h5"
    with h5py.File(out) as file:
        assert file[QKV_PATH].dtype == np.float32
        assert bool(file[QKV_PATH].is_virtual) == bool(layout)
        for name, value in source.values.items():
            dataset = file["weights/" + name.replace(".", "/")]
            assert np.array_equal(dataset[()], value.float().numpy()), name
            assert dataset.attrs["dtype"] == "bf16"
        if not layout:
            assert file[QKV_PATH].fletcher32 and file[QKV_PATH].chunks
        assert json.loads(file.attrs["model"])["num_layers"] == 4


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=64))
def test_every_bfloat16_is_the_float32_that_torch_says(tmp_path_factory, patterns):
    """Also infinities, numbers below the normal ones, and which patterns are no number."""
    bits = torch.tensor(patterns, dtype=torch.int32).to(torch.int16)
    source = MemorySource(in_bf16(SMALL))
    name = "decoder.final_layernorm.weight"
    source.values[name] = bits.repeat(16)[:16].view(torch.bfloat16)
    out = tmp_path_factory.mktemp("patterns") / "out.h5"
    convert(source, "hdf5", out)
    assert torch.equal(open_source(out).read(name).view(torch.int16), source.values[name].view(torch.int16))
    with h5py.File(out) as file:
        found = file["weights/" + name.replace(".", "/")][()]
    assert np.array_equal(found, source.values[name].float().numpy(), equal_nan=True)


def test_large_tensors_are_cut_into_chunks_of_about_2_mib(tmp_path):
    source, out = written(tmp_path, replace(SMALL, vocab_size=70_001))
    with h5py.File(out) as file:
        dataset = file["/weights/embedding/word_embeddings/weight"]
        assert dataset.shape == (70_001, 16) and dataset.chunks == (32_768, 16)
    assert_same(open_source(out), source.values)


def flip(path, needle):
    """Change one bit of the bytes that begin with ``needle``."""
    content = bytearray(path.read_bytes())
    place = content.index(needle)
    content[place + 5] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("layout", [None, "tp2.pp2"])
def test_a_flipped_bit_names_file_and_dataset(tmp_path, layout):
    source, out = written(tmp_path, SMALL, layout)
    path = out / "tp00-pp00.h5" if layout else out
    flip(path, source.values[QKV][0].numpy().tobytes())
    found = open_source(out)
    with pytest.raises(CheckpointError, match=f"{path.name}: {QKV_PATH}: .*[cC]hecksum"):
        found.read(QKV)


def test_what_passes_the_checksum_of_hdf5_is_found_by_sha256(tmp_path):
    _, out = written(tmp_path)
    with h5py.File(out, "r+") as file:
        file[QKV_PATH][0, 0] += 1.0
    with pytest.raises(CheckpointError, match=f"out.h5: {QKV_PATH}: .*sha256"):
        open_source(out).read(QKV)


def test_a_part_that_is_missing_or_of_another_directory(tmp_path):
    _, out = written(tmp_path, SMALL, "tp2.pp2")
    (out / "tp01-pp00.h5").rename(tmp_path / "kept.h5")
    with pytest.raises(CheckpointError, match="tp01-pp00.h5: missing; .* zeros"):
        open_source(out).read(QKV)
    shutil.copy(out / "tp00-pp00.h5", out / "tp01-pp00.h5")
    with pytest.raises(CheckpointError, match=f"tp01-pp00.h5: {QKV_PATH}: .*sha256"):
        open_source(out).read(QKV)


def edited(change):
    """Change the file by h5py."""

    def spoil(path):
        with h5py.File(path, "r+") as file:
            change(file)

    return spoil


def put(path, value):
    """Put a dataset, a link, or nothing in the place of another."""

    def change(file):
        if path in file:
            del file[path]
        if value is not None:
            file[path] = value

    return edited(change)


def spoil_foreign(path):
    with h5py.File(path, "w") as file:
        file["weights/x"] = np.zeros(3)


def spoil_external_link(path):
    shutil.copy(path, path.with_name("other.h5"))
    put(QKV_PATH, h5py.ExternalLink("other.h5", QKV_PATH))(path)


def spoil_group_link(file):
    file.move("weights", "elsewhere")
    file["weights"] = h5py.SoftLink("/elsewhere")


def spoil_settings(file):
    file.attrs["model"] = json.dumps({**json.loads(file.attrs["model"]), "num_layers": 10**9})


SPOILED = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "no hdf5": lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + b"x" * 100),
    "foreign": spoil_foreign,
    "missing": put(QKV_PATH, None),
    "extra": put("weights/extra", np.zeros(3, np.float32)),
    "shape": put(QKV_PATH, np.zeros((3, 16), np.float32)),
    "dtype": put(QKV_PATH, np.zeros((32, 16), np.float64)),
    "external link": spoil_external_link,
    "settings": edited(spoil_settings),
    "group link": edited(spoil_group_link),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_what_is_wrong_is_refused_when_it_is_opened(tmp_path, spoil):
    _, out = written(tmp_path)
    SPOILED[spoil](out)
    with pytest.raises(CheckpointError, match="out.h5.*(restore|hybridflow wrote)"):
        HDF5Source(out)


def remake(file, **creation):
    values, attributes = file[QKV_PATH][()], dict(file[QKV_PATH].attrs)
    del file[QKV_PATH]
    dataset = file.create_dataset(QKV_PATH, data=values, **creation)
    dataset.attrs.update(attributes)


@pytest.mark.parametrize(
    ("creation", "complaint"),
    [
        ({"compression": "gzip"}, "filters"),
        ({}, "chunks of this file"),
        ({"external": [("raw.bin", 0, h5py.h5f.UNLIMITED)]}, "chunks of this file"),
    ],
)
def test_datasets_that_are_stored_otherwise_are_refused(tmp_path, creation, complaint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out = written(tmp_path)
    with h5py.File(out, "r+") as file:
        remake(file, **creation)
    with pytest.raises(CheckpointError, match=f"out.h5: {QKV_PATH}: .*{complaint}"):
        open_source(out).read(QKV)


def test_a_hole_is_no_tensor_of_zeros(tmp_path):
    _, out = written(tmp_path)
    with h5py.File(out, "r+") as file:
        shape, attributes = file[QKV_PATH].shape, dict(file[QKV_PATH].attrs)
        del file[QKV_PATH]
        file.create_dataset(QKV_PATH, shape, "<f4", chunks=shape, fletcher32=True).attrs.update(attributes)
    with pytest.raises(CheckpointError, match=f"out.h5: {QKV_PATH}: .*has 0 bytes"):
        open_source(out).read(QKV)


@pytest.mark.parametrize(
    ("file_name", "num_rows", "complaint"),
    [
        *((name, 32, "(beside it|another selection)") for name in ("../outside.h5", "/etc/passwd", "model.h5")),
        ("tp00-pp00.h5", 16, "do not make"),
    ],
)
def test_virtual_datasets_stay_within_the_directory_and_leave_no_gap(tmp_path, file_name, num_rows, complaint):
    _, out = written(tmp_path, SMALL, "tp2")
    with h5py.File(out / "model.h5", "r+") as file:
        old = file[QKV_PATH]
        layout = h5py.VirtualLayout(old.shape, old.dtype)
        layout[:num_rows] = h5py.VirtualSource(file_name, QKV_PATH, (num_rows, old.shape[1]))
        attributes = {**old.attrs, "sha256": json.dumps(["0" * 64])}
        del file[QKV_PATH]
        file.create_virtual_dataset(QKV_PATH, layout).attrs.update(attributes)
    with pytest.raises(CheckpointError, match=f"model.h5: {QKV_PATH}: .*{complaint}"):
        open_source(out)


def write_into_little_room(path, sender):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    source = MemorySource(replace(SMALL, vocab_size=70_001))
    try:
        convert(source, "hdf5", path)
    except OSError as error:
        sender.send(str(error))
    os._exit(0)


def test_no_room_is_an_error_of_the_file_system(tmp_path):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=write_into_little_room, args=(tmp_path / "out.h5", sender))
    child.start()
    sender.close()
    assert receiver.poll(30) and "out.h5" in receiver.recv()
    child.join(30)


def test_after_no_room_the_library_has_nothing_left_that_fails(tmp_path, capfd):
    """It tried again whenever a handle went away, printed an error each time, and crashed at the end of the process."""
    values = {f"t{index}": torch.full((64, 64), float(index)) for index in range(4)}
    path = tmp_path / "out.h5"
    writer = HDF5Writer(path, {key: entry_of(each) for key, each in values.items()})
    with no_room(30_000):
        with pytest.raises(OSError) as met:
            for key, each in values.items():
                writer.write(key, each)
        writer.close()
    assert (met.value.errno, met.value.filename) == (errno.EFBIG, str(path))
    assert capfd.readouterr().err == ""


def make_pipe(path):
    """A file that nobody writes: who opens it waits."""
    os.mkfifo(path)
    return str(path)


LINKS = {
    "external": lambda pipe: h5py.ExternalLink(pipe, "/x"),
    "soft": lambda pipe: h5py.SoftLink("/elsewhere"),
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("place", ["/assets/config.json", "/assets", QKV_PATH, "/weights/decoder", "/weights"])
def test_links_are_not_followed(tmp_path, place, link):
    """A link to a pipe would wait for ever, and one to a file of others would read it."""
    _, out = written(tmp_path)
    with h5py.File(out, "r+") as file:
        file.move(place, "elsewhere")
        file[place] = LINKS[link](make_pipe(tmp_path / "pipe"))
    complains_apart(lambda: HDF5Source(out).assets(), ["out.h5", "restore it from a copy"], kind=CheckpointError)


@pytest.mark.parametrize("place", [QKV_PATH, "/weights/decoder"])
def test_links_within_a_part_are_not_followed(tmp_path, place):
    _, out = written(tmp_path, SMALL, "tp2")
    with h5py.File(out / "tp00-pp00.h5", "r+") as file:
        del file[place]
        file[place] = h5py.ExternalLink(make_pipe(tmp_path / "pipe"), "/x")
    complains_apart(lambda: open_source(out).read(QKV), ["tp00-pp00.h5", "not a dataset of this file itself"])


@pytest.mark.parametrize(("name", "count", "block"), [("pipe.h5", 1, None), ("pipe%b.h5", None, 16)])
def test_virtual_datasets_over_pipes_are_refused(tmp_path, name, count, block):
    """Of a dataset without end the library opens the sources when it is asked for the shape."""
    _, out = written(tmp_path, SMALL, "tp2")
    make_pipe(out / name.replace("%b", "0"))
    count, block, rows = (h5py.h5s.UNLIMITED if each is None else each for each in (count, block, block))
    space, part = (h5py.h5s.create_simple((16, 16), (end, 16)) for end in (h5py.h5s.UNLIMITED, rows))
    space.select_hyperslab((0, 0), (count, 1), (16, 1), (block, 16))
    if block != 16:
        part.select_hyperslab((0, 0), (1, 1), (1, 1), (block, 16))
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_virtual(space, name.encode(), QKV_PATH.encode(), part)
    space.select_all()
    with h5py.File(out / "model.h5", "r+") as file:
        del file[QKV_PATH]
        h5py.h5d.create(file.id, QKV_PATH.encode(), h5py.h5t.IEEE_F32LE, space, creation)
    complains_apart(lambda: open_source(out), ["model.h5", QKV_PATH, f"it lies in '{name}'"])


def test_pipes_in_the_place_of_files_are_refused(tmp_path):
    _, out = written(tmp_path, SMALL, "tp2")
    (out / "tp01-pp00.h5").unlink()
    make_pipe(out / "tp01-pp00.h5")
    complains_apart(lambda: open_source(out), ["model.h5", "it lies in 'tp01-pp00.h5', which is not a regular file"])
    complains_apart(lambda: read_texts(out / "tp01-pp00.h5", "prompt"), ["tp01-pp00.h5: prompt", "not a regular file"])


def test_texts_that_are_all_the_same_one(tmp_path):
    path = tmp_path / "prompts.h5"
    write_repeated_text(path, num_rows=4096, num_bytes=1 << 18)
    complains_apart(lambda: read_texts(path, "prompt"), ["prompts.h5: prompt", "more than 50 times"])

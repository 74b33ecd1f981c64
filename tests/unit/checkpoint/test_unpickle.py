"""Pickles that would run something run nothing, whatever they name; what torch saves is read lazily and exactly."""

import argparse
import builtins
import collections
import copy
import copyreg
import functools
import io
import multiprocessing
import operator
import os
import pickle
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.checkpoint.formats.torch_archive import ArchivesWriter
from hybridflow.checkpoint.formats.unpickle import Inert, MappedFile, StoredTensor, TorchArchive, dump, read_pickle
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.errors import CheckpointError

CALLED = []


def trap(*args, **_):
    """What a hostile pickle would have called."""
    CALLED.append(args)


class Reduced:
    def __init__(self, function, *args, state=None):
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.reduced


HOSTILE = {
    "system": Reduced(os.system, "touch hostile"),
    "popen": Reduced(subprocess.Popen, ["touch", "hostile"]),
    "eval": Reduced(builtins.eval, "__import__('os').system('touch hostile')"),
    "exec": Reduced(builtins.exec, "open('hostile', 'w')"),
    "open": Reduced(open, "hostile", "w"),
    "getattr": Reduced(getattr, "text", "__class__"),
    "import": Reduced(builtins.__import__, "antigravity"),
    "partial": Reduced(functools.partial, trap, 1),
    "attrgetter": Reduced(operator.attrgetter("__class__.__base__"), 1),
    "reconstructor": Reduced(copyreg._reconstructor, object, object, None),
    "path": Reduced(Path.touch, Path("hostile")),
    "trap": Reduced(trap, "x"),
    "setstate": Reduced(argparse.Namespace, state={"__class__": trap, "__setstate__": trap}),
    "load": Reduced(pickle.loads, pickle.dumps(Reduced(trap, 1))),
    "torch.load": Reduced(torch.load, "file"),
    "rmtree": Reduced(shutil.rmtree, "hostile"),
}


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    CALLED.clear()
    yield
    assert not CALLED and not Path("hostile").exists()


def archive(tmp_path, data, name="model.pt"):
    """An archive of torch.save with another pickle in it."""
    path = tmp_path / name
    torch.save({"w": torch.arange(6.0)}, path)
    with zipfile.ZipFile(path) as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for member, content in members.items():
            new.writestr(member, data if member.endswith("data.pkl") else content)
    return path


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_run_nothing(tmp_path, name, protocol):
    for value in (HOSTILE[name], {"args": [HOSTILE[name]], "x": (1, {"y": HOSTILE[name]})}):
        data = pickle.dumps(value, protocol)
        path = archive(tmp_path, data)
        with pytest.raises(CheckpointError, match="file: its pickle is refused: it names [^ ]+, which is not allowed"):
            read_pickle(data, "file")
        with pytest.raises(CheckpointError, match="model.pt: its pickle is refused: it names"):
            TorchArchive(MappedFile(path)).load()


def by_hand(*opcodes):
    return b"\x80\x02" + b"".join(opcodes) + b"."


NAMESPACE, SIZE, ORDERED = b"cargparse\nNamespace\n", b"ctorch\nSize\n", b"ccollections\nOrderedDict\n"
STORAGE, MEGATRON = b"ctorch\nFloatStorage\n", b"cmegatron.core.enums\nModelType\n"
TEXT = b"X\x04\x00\x00\x00text"
STATE = b"}(" + TEXT + b"K\x01u"


@pytest.mark.parametrize(
    "data",
    {
        "state of a class": by_hand(NAMESPACE, STATE, b"b"),
        "slots of a class": by_hand(NAMESPACE, b"N", STATE, b"\x86b"),
        "state of a function": by_hand(SIZE, STATE, b"b"),
        "slots of a function": by_hand(SIZE, b"N", STATE, b"\x86b"),
        "slots of a real class": by_hand(ORDERED, b"N", STATE, b"\x86b"),
        "filled twice": by_hand(NAMESPACE, b")R", STATE, b"b", STATE, b"b"),
        "new of a function": by_hand(SIZE, b")\x81"),
        "items of an inert object": by_hand(NAMESPACE, b")R", TEXT, b"K\x01s"),
        "appended to an inert object": by_hand(NAMESPACE, b")R", b"K\x01a"),
        "called inert object": by_hand(NAMESPACE, b")R)R"),
        "called state": by_hand(MEGATRON, b")R", TEXT, b"\x85R"),
        "storage where none is": by_hand(TEXT, b"Q"),
        "extension": by_hand(b"\x82\x01"),
        "nothing": b"",
        "no end": b"\x80\x02N",
        "a memo of gigabytes": by_hand(b"Nr\xff\xff\xff\x7f"),
        "a memo of gigabytes by text": by_hand(b"Np2000000000\n"),
        "text of gigabytes": by_hand(b"X\xff\xff\xff\xff"),
        "dotted name": b"\x80\x04\x8c\x08argparse\x8c\x12Namespace.__init__\x93.",
        "dotted name of ours": b"\x80\x04\x8c\x05torch\x8c\x15float32.__reduce_ex__\x93.",
    }.values(),
)
def test_pickles_that_no_program_writes(data):
    with pytest.raises(CheckpointError, match="file: its pickle is refused"):
        read_pickle(data, "file")
    assert not hasattr(argparse.Namespace, "text") and not hasattr(collections.OrderedDict, "text")


def doubled(levels):
    """The opcodes of ``(x, x)`` of ``(x, x)`` of …: two bytes for each level."""
    return b")" + b"2\x86" * levels


def doubled_by_memo(levels):
    """The same as programs refer to an object again."""
    return b")q\x00" + b"".join(b"h%c\x86q%c" % (level, level + 1) for level in range(levels))


def doubled_from_above(levels):
    """Lists that are filled with two of the next one while that is still empty; the first stays on the stack."""
    empty = b"".join(b"]q%c" % level for level in range(levels + 1))
    return empty + b"0" * levels + b"".join(b"h%c(h%ch%ce0" % (at, at + 1, at + 1) for at in range(levels))


def number_of_one_hash(index):
    """The opcode of a multiple of 2^61 - 1, whose hash is 0."""
    return b"\x8a\x0a" + (index * (2**61 - 1)).to_bytes(10, "little")


PERSISTENT = b"(X\x07\x00\x00\x00storage" + STORAGE
# The product of these numbers takes minutes.
HUGE_TENSOR = (
    *(b"ctorch._utils\n_rebuild_tensor_v2\n(", PERSISTENT, b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQK\x00("),
    *(b"\x8a\xff" + (2**2030).to_bytes(255, "little"),) * 20_000,
    *(b"t(", b"K\x00" * 20_000, b"ttR"),
)
# A hash or a text of these few bytes takes years or all memory; of the last but one, more stack than there is.
ENDLESS = {
    "key of a dict": by_hand(b"}", doubled(43), b"Ns"),
    "key of a dict by its memo": by_hand(b"}", doubled_by_memo(60), b"Ns"),
    "keys of a dict": by_hand(b"(", doubled(43), b"Nd"),
    "member of a set": b"\x80\x04\x8f(" + doubled(43) + b"\x90.",
    "member of a frozen set": b"\x80\x04(" + doubled(43) + b"\x91.",
    "key of an ordered dict": by_hand(ORDERED, b"]", doubled(43), b"N\x86a\x85R"),
    "storage": by_hand(PERSISTENT, doubled(80), TEXT, b"K\x06tQ"),
    "kind of storage": by_hand(b"(", doubled(80), STORAGE, TEXT, TEXT, b"K\x06tQ"),
    "lists in a storage": by_hand(PERSISTENT, doubled_from_above(60), TEXT, b"K\x06tQ"),
    "arguments": by_hand(NAMESPACE, b")R}", TEXT, doubled(80), b"sb"),
    "tuples in each other": by_hand(b"}", b")" + b"\x85" * 2_000_000, b"Ns"),
    "sizes of a text": by_hand(SIZE, b"X\x00\x00\x10\x00" + b"x" * (1 << 20), b"\x85R"),
    "keys of one hash": by_hand(b"}(", *(number_of_one_hash(index) + b"N" for index in range(30_000)), b"u"),
    "keys of one hash one by one": by_hand(b"}", *(number_of_one_hash(index) + b"Ns" for index in range(30_000))),
    "members of one hash": b"\x80\x04\x8f(" + b"".join(map(number_of_one_hash, range(30_000))) + b"\x90.",
    "large sizes": by_hand(*HUGE_TENSOR),
}


def refuse(data, path):
    with pytest.raises(CheckpointError, match="file: its pickle is refused: .{,200}$"):
        read_pickle(data, "file")
    with pytest.raises(CheckpointError, match="model.pt: its pickle is refused: .{,200}$"):
        TorchArchive(MappedFile(path)).load()


@pytest.mark.parametrize("name", ENDLESS)
def test_small_pickles_cannot_take_forever(tmp_path, name):
    path = archive(tmp_path, ENDLESS[name])
    # A process of its own: neither a hash nor a crash in the library can be stopped otherwise.
    process = multiprocessing.get_context("fork").Process(target=refuse, args=(ENDLESS[name], path))
    process.start()
    process.join(60)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_objects_that_are_referred_to_again_are_read(tmp_path):
    shared = ("some text of a real file",) * 3
    value = {"many": [[shared, {index: shared}] for index in range(5000)], "args": argparse.Namespace(a=shared)}
    for protocol in (2, 4):
        found = read_pickle(pickle.dumps(value, protocol), "file")
        assert found["many"] == value["many"] and found["args"].attributes == {"a": shared}


@pytest.mark.parametrize("change", [b"K\x01a", b"(K\x01e"])
def test_an_object_that_was_referred_to_does_not_change(change):
    assert read_pickle(by_hand(b"]q\x00", change), "file") == [1]
    for again in (b"h\x00", b"2"):
        with pytest.raises(CheckpointError, match="changes an object after it referred to it"):
            read_pickle(by_hand(b"]q\x00", again, change, b"\x86"), "file")


def test_names_below_megatron_are_inert_and_never_imported():
    found = read_pickle(by_hand(b"cmegatron.no.such.module\nThing\n", b"K\x01\x85R", STATE, b"b"), "file")
    assert isinstance(found, Inert)
    assert (found.global_name, found.args) == ("megatron.no.such.module.Thing", (1,))
    assert found.attributes == {"text": 1}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_pickles_are_read_or_refused_and_run_nothing(data):
    value = {
        "args": argparse.Namespace(a=1, b=[2, 3.0]),
        "x": collections.OrderedDict(y=torch.float32),
        "z": ("t",) * 3,
    }
    content = bytearray(pickle.dumps(value, data.draw(st.sampled_from([0, 2, 4]))))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_pickle(bytes(content), "file")
    except CheckpointError as error:
        assert "file: its pickle is refused" in str(error)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_harmless(data):
    try:
        read_pickle(b"\x80\x02" + data, "file")
    except CheckpointError as error:
        assert "file: its pickle is refused" in str(error)


def test_what_torch_saves_is_read_exactly(tmp_path):
    base = torch.randn(4, 6)
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8)
    saved = {
        "whole": base,
        "slice": base[1:3, ::2],
        "transposed": base.t(),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        **{str(dtype): torch.arange(5).to(dtype) for dtype in dtypes},
    }
    path = tmp_path / "model.pt"
    torch.save(saved, path)
    found = TorchArchive(MappedFile(path)).load()
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        assert isinstance(found[name], StoredTensor) and found[name].shape == tuple(value.shape), name
        assert found[name].dtype == value.dtype and torch.equal(found[name].read(), value.detach()), name


def test_reading_takes_no_memory_of_its_own(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(40 << 20)}, path)
    file = MappedFile(path)
    tensor = TorchArchive(file).load()["w"]
    before = anonymous_bytes()
    assert int((tensor.read()[:: 1 << 20] == 1).sum()) == 40
    file.release()
    assert anonymous_bytes() - before < 20 << 20


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_archives_that_are_damaged(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(1000.0)}, path)
    whole = path.read_bytes()

    def refused(match, content):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"model.pt: .*{match}"):
            TorchArchive(MappedFile(path)).load()["w"].read()

    place = whole.index(torch.arange(500.0, 520.0).numpy().tobytes())
    refused("data/0 has another checksum", whole[:place] + b"\xff" + whole[place + 1 :])
    refused("directory cannot be read", whole[: len(whole) // 2])
    refused("not a zip archive; files of torch before 1.6", pickle.dumps(1))
    refused("cannot be read", b"")
    place = whole.index(b"FloatStorage")
    refused("data.pkl has another checksum", whole.replace(b"FloatStorage", b"DoubleStorag"))
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    refused("compressed", path.read_bytes())


def torch_pickle(size=(6,), stride=(1,), offset=0, key="0", count=6, storage=torch.FloatStorage):
    """The pickle of a tensor with any numbers in it."""

    class Stored:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, item):
            return ("storage", storage, key, "cpu", count) if isinstance(item, Stored) else None

    buffer = io.BytesIO()
    arguments = Stored(), offset, size, stride, False, collections.OrderedDict()
    Pickler(buffer, 2).dump({"w": Reduced(torch._utils._rebuild_tensor_v2, *arguments)})
    return buffer.getvalue()


@pytest.mark.parametrize(
    "given",
    [
        {"size": (7,)},
        {"offset": 1},
        {"offset": -1},
        {"stride": (2,)},
        {"stride": (-1,)},
        {"size": (2, 3)},
        {"size": (6, 6), "stride": (0, 1)},
        {"size": (10**18, 10**18), "stride": (1, 1)},
        {"size": ("a",)},
        {"key": "1"},
        {"key": "../0"},
        {"key": ("0",)},
        {"count": 7},
        {"count": "6"},
        {"storage": torch.DoubleStorage},
        {"storage": torch.float32},
        {"storage": "FloatStorage"},
    ],
)
def test_tensors_stay_within_their_storage(tmp_path, given):
    assert TorchArchive(MappedFile(archive(tmp_path, torch_pickle()))).load()["w"].read().tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(CheckpointError, match="model.pt: its pickle is refused"):
        TorchArchive(MappedFile(archive(tmp_path, torch_pickle(**given)))).load()


def test_archives_of_ours_are_those_of_torch(tmp_path):
    entries = {"a": TensorEntry("bf16", (3, 5)), "b": TensorEntry("fp32", (1, 1, 7)), "c": TensorEntry("fp16", (2,))}
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(1, 1, 7), "c": torch.randn(2).half()}
    path = tmp_path / "file"
    for _ in range(2):  # the second goes on with the first
        writer = ArchivesWriter(path, entries)
        for key in ("c", "a", "b"):
            writer.write(key, tensors[key])
        writer.sync()
        writer.close()
    content = path.read_bytes()
    assert len(content) == writer.num_bytes
    for key, (start, layout) in writer._places.items():
        part = content[start : start + layout.num_bytes]
        assert start % 64 == 0 and len(layout.around(0)[0]) % 64 == 0
        assert zipfile.ZipFile(io.BytesIO(part)).testzip() is None
        assert torch.equal(torch.load(io.BytesIO(part), weights_only=True), tensors[key])
        found = TorchArchive(MappedFile(path), start, start + layout.num_bytes).tensor()
        assert torch.equal(found.read(), tensors[key])


def test_plain_values_are_pickled_as_others_read_them():
    assert pickle.loads(dump({"args": argparse.Namespace(a=torch.float32)}))["args"].a is torch.float32


@pytest.mark.parametrize("module", ["__builtin__", "builtins"])
def test_members_of_enumerations_as_older_pythons_pickle_them(module):
    name = "torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING"
    member = read_pickle(f"c{module}\ngetattr\n(c{name}\nVTORCH_CONTIGUOUS_FORMAT\ntR.".encode(), "here")
    assert isinstance(member, Inert) and member.args == ("TORCH_CONTIGUOUS_FORMAT",)
    # It is no way to anything that an object has.
    for chain in (f"(c{name}\nV__class__\ntR(tR.", f"(c{name}\nV__init__\ntR)R."):
        with pytest.raises(CheckpointError):
            read_pickle(f"c{module}\ngetattr\n{chain}".encode(), "here")


def test_a_parameter_is_a_tensor(tmp_path):
    """Else the name would give back a list that was referred to, as one that may change."""
    path = archive(tmp_path, by_hand(b"ctorch._utils\n_rebuild_parameter\n", b"]\x88}\x87R", b"K\x01a"))
    with pytest.raises(CheckpointError, match="model.pt: its pickle is refused: a parameter of a list"):
        TorchArchive(MappedFile(path)).load()


def test_members_do_not_share_bytes(tmp_path):
    """Else a small file would have tensors that take years to read."""
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("archive/data/0", bytes(1000))
        for number in range(1, 9):
            info = copy.copy(new.filelist[0])
            info.filename = f"archive/data/{number}"
            new.filelist.append(info)
    with pytest.raises(CheckpointError, match="model.pt: .*two members share bytes"):
        TorchArchive(MappedFile(path))

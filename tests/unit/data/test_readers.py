"""Rows of every format are the same rows, in any cut of a file; what is malformed is named by file and line or row."""

import codecs
import datetime
import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config.data import DataConfig
from hybridflow.data import hdf5, readers
from hybridflow.data.files import find_files
from hybridflow.data.part import Given, Hashed
from hybridflow.errors import DataError
from tests.e2e.commands import free_port
from tests.support.complaints import complains_apart
from tests.support.row_files import ENDINGS, examples_of_file, read_file, write_repeated_text, write_rows

pytest.importorskip("pyarrow")
pytest.importorskip("datasets")

import datasets  # noqa: E402
import fsspec  # noqa: E402
import h5py  # noqa: E402
import pyarrow  # noqa: E402
from pyarrow import parquet  # noqa: E402

ROOT = Path(__file__).parents[3]
DATA = DataConfig(train="", held_out="")
ROWS = [
    {"prompt": f"{number}+é=\n☃", "answer": str(number), "level": number, "share": number / 4} for number in range(20)
]
GOOD = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize("file_format", ENDINGS)
def test_rows_are_those_that_were_written_by_the_formats_own_library(tmp_path, file_format):
    path = write_rows(tmp_path / "rows", ROWS, file_format)
    found = read_file(path)
    assert [row for _, row in found] == ROWS
    mark = (lambda number: f"{path}:{number + 1}") if file_format == "jsonl" else (lambda n: f"{path}: row {n}")
    assert [place for place, _ in found] == [mark(number) for number in range(len(ROWS))]
    assert [each.prompt for each in examples_of_file(path, DATA)] == [row["prompt"] for row in ROWS]


@pytest.mark.parametrize("file_format", ["jsonl", "parquet", "hdf5", "datasets"])
def test_every_cut_of_a_file_gives_each_row_once_with_its_place(tmp_path, file_format, monkeypatch):
    path = write_rows(tmp_path / "rows", ROWS, file_format)
    whole = read_file(path)
    for size in (1, 5, 64, 100):
        monkeypatch.setattr(readers, "_PIECE_BYTES", size)
        monkeypatch.setattr(readers, "_PIECE_ROWS", size)
        assert read_file(path) == whole


@given(lines=st.lists(st.text("ab \r", max_size=9), max_size=12), size=st.integers(1, 40), ends=st.booleans())
@settings(max_examples=200, deadline=None)
def test_lines_of_pieces_are_the_lines_of_the_file(tmp_path_factory, lines, size, ends):
    """Blank lines, very short pieces and a last line without an end included."""
    content = "\n".join(lines).encode() + (b"\n" if ends else b"")
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes(content)
    starts = range(0, max(1, len(content)), size)
    found = []
    for start in starts:
        with path.open("rb") as file:
            found += readers._lines(file, start, min(start + size, len(content)), 100)
    # What split gives behind the last line feed is no line.
    assert found == content.split(b"\n")[: -1 if content.endswith(b"\n") or not content else None]


@given(most=st.integers(1, 20), lengths=st.lists(st.integers(0, 40), max_size=8))
@settings(max_examples=200, deadline=None)
def test_a_line_is_read_if_it_is_not_longer_than_allowed(tmp_path_factory, most, lengths):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes(b"".join(b"x" * length + b"\n" for length in lengths))
    with path.open("rb") as file:
        found = list(readers._lines(file, 0, path.stat().st_size, most))
    assert found == [b"x" * length if length <= most else None for length in lengths]


def test_patterns_mean_files_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        write_rows(tmp_path / name, [{**GOOD, "answer": name}], "jsonl")
    (tmp_path / "a[1].jsonl").write_text(json.dumps({**GOOD, "answer": "literal"}))
    assert [row["answer"] for _, row in read_file(tmp_path / "[a-c].jsonl")] == ["a", "b", "c"]
    assert [row["answer"] for _, row in read_file(tmp_path / "a[1].jsonl")] == ["literal"], "a file of that very name"
    with pytest.raises(DataError, match=r"x\*\.jsonl: no file has such a name; set data\.train"):
        read_file(tmp_path / "x*.jsonl")


def test_compressed_lines_and_addresses(tmp_path):
    content = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(content))
    assert [row for _, row in read_file(tmp_path / "rows.jsonl.gz")] == ROWS
    table = write_rows(tmp_path / "rows", ROWS, "parquet").read_bytes()
    columns = write_rows(tmp_path / "rows", ROWS, "hdf5").read_bytes()
    (tmp_path / "marked.jsonl").write_bytes(codecs.BOM_UTF8 + content)
    assert [row for _, row in read_file(tmp_path / "marked.jsonl")] == ROWS
    memory = fsspec.filesystem("memory")
    for name, data in (("b.jsonl", content), ("a.jsonl", content[:0]), ("r.parquet", table), ("r.h5", columns)):
        memory.pipe(f"/rows/{name}", data)
    assert read_file("memory://rows/*.jsonl")[3] == ("memory:///rows/b.jsonl:4", ROWS[3])
    for name in ("r.parquet", "r.h5"):
        assert [row for _, row in read_file(f"memory://rows/{name}")] == ROWS
    datasets.Dataset.from_list(ROWS[:5]).save_to_disk("memory://rows/saved")
    before = find_files("memory://rows/saved")
    datasets.Dataset.from_list(ROWS).save_to_disk("memory://rows/saved")
    assert find_files("memory://rows/saved") != before, "the same files were written anew"
    for address, says in (
        ("memory://rows/none.jsonl", "none.jsonl: cannot be read: FileNotFoundError"),
        ("nothing://rows", "nothing://rows: cannot be read: ValueError: Protocol not known"),
    ):
        with pytest.raises(DataError, match=says):
            read_file(address)


def test_nested_columns_become_json(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "hi", "name": None}], "at": datetime.date(2026, 1, 2), "no": None},
        {"messages": [], "at": None, "no": 7},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    for name, nulls in (("rows.parquet", {}), ("rows.jsonl", {"name": None})):
        (_, first), (_, second) = read_file(tmp_path / name)
        assert first == {"messages": [{"role": "user", "content": "hi", **nulls}], "at": "2026-01-02"}
        assert second == {"messages": [], "no": 7}, "a field that is null is absent"


def test_messages_and_tools_of_a_table_have_no_fields_of_other_rows(tmp_path):
    """A column of objects gives each the fields of all. A chat template would write the nulls into the prompt."""
    rows = [_row_with_tool("a"), _row_with_tool("b")]
    rows_of_a_table = datasets.Dataset.from_list(rows)
    assert rows_of_a_table[0]["tools"][0]["parameters"] == {"a": {"type": "integer"}, "b": None}
    rows_of_a_table.to_parquet(tmp_path / "rows.parquet")
    rows_of_a_table.save_to_disk(tmp_path / "saved")
    expected = [{**row, "extra": {"a": None, "b": None, name: 1}} for row, name in zip(rows, "ab", strict=True)]
    for name in ("rows.parquet", "saved"):
        assert [row for _, row in read_file(tmp_path / name)] == expected, "other columns keep their nulls"
    assert list(Hashed(Given(rows_of_a_table, "rows"))) == expected
    assert list(Hashed(Given([{**GOOD, "tools": [{"default": None}]}], "rows"))) == [
        {**GOOD, "tools": [{"default": None}]}
    ], "no table"


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this version of datasets has no type for JSON")
def test_columns_of_json_are_values(tmp_path):
    rows = [{"tools": [{"name": "a", "default": None}], "answer": {"x": None}}, {"tools": [{"x": 1}], "answer": [1]}]
    types = datasets.Features({"tools": datasets.List(datasets.Json()), "answer": datasets.Json()})
    rows_of_a_table = datasets.Dataset.from_list(rows, features=types)
    rows_of_a_table.to_parquet(tmp_path / "rows.parquet")
    rows_of_a_table.save_to_disk(tmp_path / "saved")
    for name in ("rows.parquet", "saved"):
        assert [row for _, row in read_file(tmp_path / name)] == rows
    assert list(Hashed(Given(rows_of_a_table, "rows"))) == rows


def _row_with_tool(name: str) -> dict:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": {name: 1}}]}
    return {
        "prompt": [{"role": "user", "content": "hi"}, call],
        "tools": [{"name": name, "parameters": {name: {"type": "integer"}}}],
        "extra": {name: 1},
    }


def test_columns_of_hdf5_hold_messages_as_json_text(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"chosen": json.dumps(messages, indent=1), "answer": '["role"]'}, {"chosen": '[{"role"', "answer": "a"}]
    found = [row for _, row in read_file(write_rows(tmp_path / "rows", rows, "hdf5"))]
    assert found == [{**rows[0], "chosen": messages}, rows[1]], "no other text is changed"


LINE = json.dumps(GOOD).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (LINE + b'{"prompt": ', "rows.jsonl:2: not valid JSON"),
        (LINE + b"\n" + b'"text"\n' + LINE, "rows.jsonl:3: expected a JSON object, found str 'text'"),
        (LINE + b'{"prompt": "\xff", "answer": "2"}', "rows.jsonl:2: not UTF-8: invalid start byte at byte 12"),
        (LINE + b'{"prompt": "' + b"x" * (2 << 24) + b'"}\n', "rows.jsonl:2: longer than data.max_row_bytes=16777216"),
        (LINE + b'{"answer": "2"}', "rows.jsonl:2: no field 'prompt'; found ['answer']"),
        (LINE + b'{"prompt": 7, "answer": "2"}', "rows.jsonl:2: field 'prompt': expected text, found 7"),
        (LINE + b'{"prompt": "", "answer": "2"}', "rows.jsonl:2: field 'prompt' is empty"),
        (LINE + b'{"prompt": "1"}', "rows.jsonl:2: no field 'answer'"),
        (LINE + b"[" * 100_000, "rows.jsonl:2: not valid JSON"),
        (LINE + b"\x00\x00", "rows.jsonl:2: not valid JSON"),
        (LINE.decode().encode("utf-16"), "rows.jsonl:1: not UTF-8"),
        (b"", "rows.jsonl: holds no rows"),
        (
            b"[" + LINE.strip() + b"]\n",
            "found list [{'prompt': '1+1=', 'answer': '2'}]; expected one object on each line, as `jq",
        ),
        (
            b"[\n" + LINE + b"]\n",
            "rows.jsonl:1: begins a list of JSON; expected one object on each line, as `jq -c '.[]'",
        ),
        (b"[1, 2]\n", "rows.jsonl:1: expected a JSON object, found list [1, 2]"),
    ],
)
def test_malformed_lines(tmp_path, content, says):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError) as caught:
        examples_of_file(tmp_path / "rows.jsonl", DATA)
    assert says in str(caught.value), caught.value


def cut_in_half(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def damaged(path):
    """The pages of the first column are overwritten; the footer is whole."""
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)


def columns(**values):
    return pyarrow.table(values)


TEXT = pyarrow.array(["1", "2"])


@pytest.mark.parametrize(
    ("table", "spoil", "says"),
    [
        (columns(prompt=TEXT, answer=TEXT), cut_in_half, "rows.parquet: cannot be read as Parquet: ArrowInvalid"),
        (columns(prompt=TEXT, answer=TEXT), lambda path: path.write_bytes(b""), "cannot be read as Parquet"),
        (columns(prompt=TEXT, answer=TEXT), lambda path: path.write_text("{}"), "rows.parquet: cannot be read as Parq"),
        (columns(prompt=TEXT, answer=TEXT), damaged, "rows.parquet: cannot be read as Parquet"),
        (columns(prompt=TEXT, answer=TEXT), lambda path: path.unlink(), "rows.parquet: cannot be read: No such file"),
        (columns(prompt=TEXT), None, "rows.parquet: row 0: no field 'answer'; found ['prompt']"),
        (columns(prompt=[1, 2], answer=TEXT), None, "rows.parquet: row 0: field 'prompt': expected text, found 1"),
        (columns(prompt=["1", None], answer=TEXT), None, "rows.parquet: row 1: no field 'prompt'; found ['answer']"),
        (columns(prompt=[b"1", b"\xff"], answer=TEXT), None, "rows.parquet: row 1: not UTF-8: invalid start byte"),
        (columns(prompt=TEXT[:0], answer=TEXT[:0]), None, "rows.parquet: holds no rows"),
        (
            columns(
                prompt=pyarrow.Array.from_buffers(
                    pyarrow.string(), 2, pyarrow.array([b"1", b"\xff"], pyarrow.binary()).buffers()
                ),
                answer=TEXT,
            ),
            None,
            "rows.parquet: row 1: not UTF-8",
        ),
    ],
)
def test_malformed_parquet(tmp_path, table, spoil, says):
    path = tmp_path / "rows.parquet"
    parquet.write_table(table, path)
    if spoil is not None:
        spoil(path)
    with pytest.raises(DataError) as caught:
        examples_of_file(path, DATA)
    assert says in str(caught.value), caught.value


TEXTS = ["1", "2"]


def external(file):
    file["prompt"] = h5py.ExternalLink("other.h5", "prompt")


@pytest.mark.parametrize(
    ("values", "spoil", "says"),
    [
        ({"prompt": TEXTS, "answer": TEXTS}, cut_in_half, "rows.h5: cannot be read as rows of HDF5"),
        ({"prompt": TEXTS, "answer": TEXTS}, lambda path: path.write_bytes(b""), "rows.h5: cannot be read as rows of"),
        ({"prompt": TEXTS, "answer": TEXTS}, lambda path: path.write_text("{}"), "rows.h5: cannot be read as rows of"),
        ({"prompt": TEXTS, "answer": TEXTS}, lambda path: path.unlink(), "rows.h5: cannot be read: No such file"),
        ({"prompt": TEXTS, "answer": ["1"]}, None, "of several lengths: {'answer': 1, 'prompt': 2}"),
        ({"prompt": TEXTS}, None, "rows.h5: row 0: no field 'answer'; found ['prompt']"),
        ({"prompt": [1, 2], "answer": TEXTS}, None, "rows.h5: row 0: field 'prompt': expected text, found 1"),
        ({"prompt": [b"1", b"\xff"], "answer": TEXTS}, None, "rows.h5: row 1: not UTF-8: invalid start byte"),
        ({"prompt": "text", "answer": TEXTS}, None, "dataset 'prompt' of shape ()"),
        ({"prompt": TEXTS[:0], "answer": TEXTS[:0]}, None, "rows.h5: holds no rows"),
        ({}, None, "rows.h5: cannot be read as rows of HDF5: it has no dataset"),
        ({"answer": TEXTS}, external, "'prompt' is not a dataset of this file itself"),
        ({"answer": TEXTS}, lambda file: file.create_group("prompt"), "'prompt' is not a dataset of this file itself"),
    ],
)
def test_malformed_hdf5(tmp_path, values, spoil, says):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        for name, column in values.items():
            is_text = not isinstance(column, list) or not column or isinstance(column[0], str | bytes)
            file.create_dataset(name, data=column, dtype=h5py.string_dtype() if is_text else None)
        if "prompt" not in values and spoil is not None:
            spoil(file)
    if "prompt" in values and spoil is not None:
        spoil(path)
    with pytest.raises(DataError) as caught:
        examples_of_file(path, DATA)
    assert says in str(caught.value), caught.value


def without_arrow(path):
    for file in path.glob("*.arrow"):
        file.unlink()


def test_hdf5_by_a_relative_path_after_a_change_of_folder(tmp_path, monkeypatch):
    """What looks through files begins once, in the folder of that time."""
    hdf5._process.cache_clear()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with h5py.File("rows.h5", "w") as file:
            file["prompt"] = [name]
        hdf5.try_file("rows.h5")
        (tmp_path / name / "rows.h5").rename(tmp_path / name / "elsewhere.h5")


@pytest.mark.parametrize(
    ("rows", "spoil", "says"),
    [
        ([GOOD], without_arrow, "what save_to_disk has written, a file, or a pattern such as "),
        ([GOOD], lambda path: [cut_in_half(file) for file in path.glob("*.arrow")], "saved: is no directory that data"),
        ([GOOD], lambda path: (path / "state.json").write_text("{"), "saved: is no directory that datasets has saved"),
        ([GOOD], lambda path: (path / "state.json").unlink(), "saved: is no directory that datasets has saved"),
        ([GOOD], lambda path: (path / "dataset_info.json").unlink(), "saved: is no directory that datasets has saved"),
        ([{"prompt": "1"}], None, "saved: row 0: no field 'answer'; found ['prompt']"),
        ([GOOD, {**GOOD, "prompt": None}], None, "saved: row 1: no field 'prompt'"),
        ([{**GOOD, "prompt": 7}], None, "saved: row 0: field 'prompt': expected text, found 7"),
        ([{**GOOD, "prompt": {"a": "1"}}], None, "saved: row 0: field 'prompt': expected text, found {'a': '1'}"),
    ],
)
def test_malformed_directories_of_datasets(tmp_path, rows, spoil, says):
    path = write_rows(tmp_path / "saved", rows, "datasets")
    if spoil is not None:
        spoil(path)
    with pytest.raises(DataError) as caught:
        examples_of_file(path, DATA)
    assert says in str(caught.value), caught.value


def test_files_of_other_programs_are_told_apart_by_their_names(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer\n1+1=,2\n")
    with pytest.raises(DataError, match=r"rows\.csv: CSV is not read; write it as JSONL, for instance with pandas"):
        examples_of_file(tmp_path / "rows.csv", DATA)
    assert readers.format_of("rows.csv", "jsonl") == "jsonl"


def test_splits_are_named(tmp_path):
    one = datasets.Dataset.from_dict({"prompt": ["1"], "answer": ["2"]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"holds the splits train, test; name one of them: .*saved/SPLIT"):
        read_file(tmp_path / "saved")
    assert [row for _, row in read_file(tmp_path / "saved/test")] == [{"prompt": "1", "answer": "2"}]


def test_truncated_gzip(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(itertools.repeat(LINE, 1000)))[:-10])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz: cannot be read to its end"):
        read_file(path)


OBJECT_STORE = """
import sys, boto3
from moto.server import ThreadedMotoServer
from tests.support.row_files import read_file
server = ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False)
server.start()
store = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{sys.argv[1]}", region_name="us-east-1")
store.create_bucket(Bucket="rows")
for path in sys.argv[2:]:
    store.upload_file(path, "rows", path.rpartition("/")[2])
for name in ("*.jsonl", "rows.parquet", "rows.h5"):
    print([row["answer"] for _, row in read_file(f"s3://rows/{name}")])
try:
    read_file("s3://rows/none.jsonl")
except Exception as error:
    print(type(error).__name__, error)
server.stop()
"""


def test_an_object_store_in_the_form_of_s3(tmp_path):
    for name in ("s3fs", "moto.server", "boto3"):
        pytest.importorskip(name)
    paths = [write_rows(tmp_path / "rows", ROWS, file_format) for file_format in ("jsonl", "parquet", "hdf5")]
    port = str(free_port())
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    done = subprocess.run(
        [sys.executable, "-c", OBJECT_STORE, port, *map(str, paths)],
        env={**os.environ, **keys, "PYTHONPATH": str(ROOT), "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *found, missing = done.stdout.splitlines()
    assert found == [str([row["answer"] for row in ROWS])] * 3
    assert missing.startswith("DataError s3://rows/none.jsonl: cannot be read: FileNotFoundError"), missing


def hollow(path, *, num_rows=1, **column):
    """A file of a few kB that says of a column what it has no values for."""
    with h5py.File(path, "w") as file:
        file.create_dataset("prompt", **{"shape": (num_rows,), "dtype": "S8", **column})


HOLLOW = {
    "long texts": (dict(dtype="S2000000000"), "its rows have 2000000000 bytes, more than data.max_row_bytes="),
    "long lists": (dict(shape=(1, 1 << 30), dtype="i1"), "its rows have 1073741824 bytes"),
    "large chunks": (
        dict(shape=(1 << 12,), dtype="S65536", chunks=(1 << 12,), compression="gzip"),
        "has chunks of 268435456 bytes; write chunks of 67108864",
    ),
    "many rows": (dict(num_rows=10**12), "it has 1000000000000 rows in "),
    "other filters": (dict(dtype="i4", chunks=(1,), scaleoffset=4), "has the filters [6]; use gzip"),
}


@pytest.mark.parametrize("name", HOLLOW)
def test_hdf5_takes_no_more_memory_than_its_size_allows(tmp_path, name):
    column, says = HOLLOW[name]
    hollow(tmp_path / "rows.h5", **column)
    complains_apart(lambda: read_file(tmp_path / "rows.h5"), ["rows.h5: cannot be read as rows of HDF5", says])


def test_texts_that_lie_in_a_file_once_are_read_a_few_at_a_time(tmp_path):
    write_repeated_text(tmp_path / "rows.h5", num_rows=2048, num_bytes=1 << 18)

    def read_all():
        (file,) = find_files(str(tmp_path / "rows.h5"))
        (piece,) = readers.cut(file, "hdf5", max_row_bytes=1 << 20)
        assert sum(len(row["prompt"]) for row in readers.read(piece, max_row_bytes=1 << 20)) == 2048 << 18
        raise DataError("all of it was read")

    complains_apart(read_all, ["all of it was read"])


@pytest.mark.parametrize("file_format", ["hdf5", "parquet", "datasets"])
def test_a_long_row_is_a_bad_row(tmp_path, file_format):
    rows = [GOOD, {"prompt": "x" * 5000, "answer": "2"}, GOOD]
    path = write_rows(tmp_path / "rows", rows, file_format)
    first, (_, second), third = read_file(path, max_row_bytes=4000)
    assert (first[1], third[1]) == (GOOD, GOOD)
    assert str(second) == "<here>: longer than data.max_row_bytes=4000; shorten it, or raise the key"


def test_parquet_takes_no_more_memory_than_its_size_allows(tmp_path):
    path = tmp_path / "rows.parquet"
    for texts, says in (
        (["x" * (40 << 20)], "a row group has "),
        (["x" * 1000] * 999 + ["x" * (40 << 20)], "a row group has "),
        ([os.urandom(3 << 20).hex()], "a row is longer than data.max_row_bytes=1048576"),
    ):
        parquet.write_table(columns(prompt=texts), path, compression="zstd", use_dictionary=False)
        complains_apart(lambda: read_file(path), ["rows.parquet: cannot be read as Parquet", says])


def test_equal_rows_take_less_than_a_byte(tmp_path):
    prompts = ["1+1="] * 50_000
    parquet.write_table(columns(prompt=prompts), tmp_path / "rows.parquet")
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("prompt", data=[each.encode() for each in prompts], dtype="S4", compression="gzip")
    for name in ("rows.parquet", "rows.h5"):
        assert (tmp_path / name).stat().st_size < len(prompts)
        assert [row for _, row in read_file(tmp_path / name)] == [{"prompt": each} for each in prompts]


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows", [{"prompt": "a"}], "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = f"{path}: reading Parquet takes the package pyarrow, which is not installed; pip install 'hybridflow[data]'"
    with pytest.raises(DataError) as error:
        read_file(path)
    assert str(error.value) == said


def test_pipes_are_no_files_of_rows(tmp_path):
    for name in ("rows.jsonl", "rows.parquet", "rows.h5"):
        os.mkfifo(tmp_path / name)
        complains_apart(lambda name=name: read_file(tmp_path / name), [name, "is not a regular file"])


def test_a_file_of_which_the_library_never_ends_is_refused(tmp_path, monkeypatch):
    """An object of no bytes in the heap of texts: the library looks for the next one where this one is."""
    monkeypatch.setattr(hdf5, "_CPU_S", 1)
    path = write_rows(tmp_path / "rows", ROWS, "hdf5")
    content = bytearray(path.read_bytes())
    heap = content.index(b"GCOL") + 16
    content[heap : heap + 16] = bytes(16)
    path.write_bytes(content)
    complains_apart(lambda: read_file(path), ["rows.h5: cannot be read as rows of HDF5: the library crashes or needs"])

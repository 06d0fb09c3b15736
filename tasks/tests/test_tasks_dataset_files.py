"""Files of data sets: formats, columns of every type, and each way in which a file is bad."""

import bz2
import csv
import decimal
import gzip
import json
import lzma
import subprocess
import sys
import textwrap

import pyarrow
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from dataset_files import spec, write_lines

from scalerl_tasks import SourceError, open_dataset

FORMATS = [
    "jsonl",
    "json",
    "csv",
    "tsv",
    "parquet",
    "arrow",
    "stream.arrow",
    "jsonl.gz",
    "csv.xz",
    "json.bz2",
    "jsonl.zst",
]


@pytest.mark.parametrize("form", FORMATS)
def test_dataset_is_the_same_in_every_format(tmp_path, form):
    rows = [{"question": f'ä\u2028 {i},\n"{i}"?', "answer": f"#### {i}"} for i in range(1500)]
    path, table = tmp_path / f"d.{form}", pyarrow.Table.from_pylist(rows)
    kind = form.split(".")[0]
    if form == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=400)
    elif form.endswith("arrow"):
        make = pyarrow.ipc.new_stream if "stream" in form else pyarrow.ipc.new_file
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=700)
    else:
        plain = tmp_path / "plain"
        if kind == "jsonl":
            write_lines(plain, rows)
        elif kind == "json":
            plain.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8-sig")
        else:
            with plain.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
                writer.writeheader()
                writer.writerows(rows)
        pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}.get(
            form.rpartition(".")[2], lambda b: b
        )
        if form.endswith(".zst"):
            with pyarrow.output_stream(str(path), compression="zstd") as out:
                out.write(plain.read_bytes())
        else:
            path.write_bytes(pack(plain.read_bytes()))
    source = open_dataset(spec("d.*"), tmp_path)
    assert len(source) == 1500
    assert [(source[i].text, source[i].answer) for i in (0, 700, 1499)] == [
        (rows[i]["question"], str(i)) for i in (0, 700, 1499)
    ]
    # A row of CSV has two lines, after the header.
    row = {"jsonl": "line 1,500", "csv": "line 3,000", "tsv": "line 3,000"}.get(kind, "row 1,500")
    assert source.place(1499) == f"{path}, {row}"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("d.jsonl", b"", "is empty"),
        ("d.jsonl", '{"prompt": "p", "answer": "1"}'.encode("utf-16"), "is UTF-16; convert it"),
        ("d.jsonl", b'{"prompt": "p\xe4", "answer": "1"}', "byte 0xe4 is not UTF-8"),
        ("d.parquet", b"PAR1 and then nothing", "cannot be read as Parquet"),
        ("d.parquet", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("d.arrow", b"ARROW1 nothing more", "cannot be read as Arrow"),
        (
            "d.jsonl.gz",
            gzip.compress(b'{"prompt": "p", "answer": "1"}\n' * 999, mtime=0)[:60],
            "cannot be read",
        ),
        ("d.json", b'[{"prompt": "p", "answer": "1"}, {"pro', "row 2: bad JSON"),
        ("d.json", b"3", "is neither a JSON array of objects nor one object a line"),
        ("d.csv", b"prompt,answer\np,1\nq,2,3\n", "line 3: has 3 fields, the header 2"),
        ("d.csv", b"prompt,prompt\np,1\n", "two columns of one name"),
        ("d.csv", b"prompt,answer\np,1\n\xe4,1\n", "this line, or one soon after it, is not UTF-8"),
        (
            "d.jsonl",
            b'[{"prompt": "p", "answer": "1"}]',
            "not an object; name a file that is one array .json",
        ),
        ("d.txt", b"x", "unknown ending; files are .jsonl"),
        ("d.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("d.csv", b"prompt;answer\np;1\n", "its fields are separated by ';'; write it with commas"),
        (
            "d.json",
            b'{"prompt": ["p", "q"], "answer": ["1", "2"]}',
            "is one JSON object of 'prompt', 'answer'",
        ),
        (
            "d.json",
            b'{"data": [{"prompt": "p", "answer": "1"}]}',
            "is one JSON object of 'data'; write a list",
        ),
    ],
)
def test_dataset_bad_file_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError) as caught:
        open_dataset(spec(name), tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_dataset_of_every_type_of_a_column(tmp_path):
    """Of Parquet: what JSON and Python have no type for becomes text, or is named."""
    columns = {
        "prompt": pa.array(["p"]).dictionary_encode(),
        "answer": pa.array([decimal.Decimal("1.10")]),
        "time": pa.array([1], pa.timestamp("ns")),
        "bytes": pa.array([b"\xff"]),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
    }
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "d.parquet")
    one = open_dataset(spec("d.parquet"), tmp_path)[0]
    assert (one.text, one.answer) == ("p", "1.10")
    assert one.metadata == {
        "answer": "1.10",
        "time": "1970-01-01 00:00:00.000000001",
        "bytes": "/w==",
        "map": [["k", 1]],
    }
    nested = pa.array([{"t": 1}], pa.struct([("t", pa.timestamp("ns"))]))
    pyarrow.parquet.write_table(pa.table(columns | {"nested": nested}), tmp_path / "e.parquet")
    with pytest.raises(SourceError, match=r"e\.parquet, row 1: cannot be read: Nanosecond"):
        open_dataset(spec("e.parquet"), tmp_path)


def test_dataset_without_a_file_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"\*\.parquet: no such file"):
        open_dataset(spec("*.parquet"), tmp_path)
    (tmp_path / "sub").mkdir()
    with pytest.raises(SourceError, match="is a directory; name its files"):
        open_dataset(spec("sub"), tmp_path)


def test_dataset_full_disk_leaves_nothing(tmp_path):
    """The limit of a file's size stands for a full disk: a write fails in the middle."""
    write_lines(
        tmp_path / "d.jsonl", [{"prompt": f"p {i} " + "x" * 2000, "answer": "1"} for i in range(2000)]
    )
    code = f"""
        import resource
        from pathlib import Path
        from scalerl_api.source import DatasetSource
        from scalerl_tasks import SourceError, open_dataset
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
        try:
            open_dataset(DatasetSource(files=["d.jsonl"]), Path({str(tmp_path)!r}))
        except SourceError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert "cannot be written after" in done.stdout
    assert "make room" in done.stdout
    assert list((tmp_path / "data").iterdir()) == []

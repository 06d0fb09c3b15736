"""The tables that data sets are read into: whose they are, and what they return."""

import subprocess
import sys
import textwrap

import pyarrow
import pyarrow.parquet
import pytest
from dataset_files import VERL, opened, spec, write_lines
from hypothesis import given
from hypothesis import strategies as st

from scalerl_tasks import SourceError, open_dataset
from scalerl_tasks.dataset import table_source as dataset_source
from scalerl_tasks.dataset.table import Table
from scalerl_tasks.split import text_key


def test_dataset_of_a_run_stays_as_it_was(tmp_path):
    """A run reads its own table, whatever becomes of the files; another section makes another table."""
    first = opened(tmp_path, [{"prompt": "p", "answer": "1"}, {"prompt": "q", "answer": "2"}])
    again = opened(tmp_path, [{"prompt": "changed", "answer": "3"}])
    assert (again.digest, again[0].text) == (first.digest, "p")
    (tmp_path / "d.jsonl").unlink()
    assert open_dataset(spec("d.jsonl"), tmp_path)[1].text == "q"
    with pytest.raises(SourceError, match="no such file"):
        open_dataset(spec("d.jsonl", filter={"maxRejected": "0.1"}), tmp_path)


def test_dataset_in_the_cache_follows_the_file(tmp_path, monkeypatch):
    """The cache has a table for each state of a file, and a run takes it from there without reading the file."""
    write_lines(tmp_path / "d.jsonl", [{"prompt": "p", "answer": "1"}])
    path = spec(str(tmp_path / "d.jsonl"))
    assert open_dataset(path)[0].text == "p"
    write_lines(tmp_path / "d.jsonl", [{"prompt": "other", "answer": "1"}])
    cached = open_dataset(path)
    assert cached[0].text == "other"
    monkeypatch.setattr(dataset_source, "read_rows", lambda path: pytest.fail("the file was read again"))
    assert open_dataset(path, tmp_path / "run").digest == cached.digest


def test_dataset_in_the_cache_of_an_earlier_release_is_checked(tmp_path, monkeypatch):
    write_lines(tmp_path / "d.jsonl", [{"prompt": "p", "answer": "1", "split": "test"}])
    misspelt = spec(str(tmp_path / "d.jsonl"), filter={"where": ["spilt != 'test'"]})
    with monkeypatch.context() as earlier:
        earlier.setattr(dataset_source.Mapper, "check_all", lambda self: None)
        earlier.setattr(dataset_source, "_CACHE_VERSION", 1)
        assert len(open_dataset(misspelt)) == 1
    with pytest.raises(SourceError, match="no row has 'spilt'; did you mean 'split'"):
        open_dataset(misspelt)


def test_dataset_table_that_is_cut_off_is_refused(tmp_path):
    opened(tmp_path, [{"prompt": "p", "answer": "1"}])
    (table,) = (tmp_path / "data").glob("*.rows")
    whole = table.read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        table.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=str(table)):
            Table(table)


def test_dataset_table_is_read_without_pyarrow(tmp_path):
    """The coordinator's image has none."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL]), tmp_path / "d.parquet")
    code = f"""
        import sys
        from pathlib import Path
        for name in ("pyarrow", "huggingface_hub"):
            sys.modules[name] = None
        from scalerl_api.source import DatasetSource
        from scalerl_tasks import SourceError, open_dataset
        spec, root = DatasetSource(files=["d.parquet"]), Path({str(tmp_path)!r})
        try:
            print(open_dataset(spec, root)[0].answer)
        except SourceError as error:
            print(error)
    """

    def run():
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
        ).stdout

    assert "needs pyarrow, which is not installed here" in run()
    open_dataset(spec("d.parquet"), tmp_path)
    assert run() == "72\n"


@given(st.lists(st.tuples(st.text(min_size=1), st.text(min_size=1), st.text()), min_size=1, max_size=8))
def test_dataset_returns_any_text(tmp_path_factory, rows):
    rows = [row for row in rows if row[0].strip() and row[1].strip() and not row[0].lstrip().startswith("[{")]
    first = {}
    for row in rows:
        first.setdefault(text_key(row[0]), row)
    rows = list(first.values())
    if not rows:
        return
    directory = tmp_path_factory.mktemp("any")
    table = pyarrow.Table.from_pylist([{"prompt": p, "answer": a, "more": m} for p, a, m in rows])
    pyarrow.parquet.write_table(table, directory / "d.parquet")
    source = open_dataset(spec("d.parquet"), directory)
    assert [
        (source[i].text, source[i].answer, source[i].metadata["more"]) for i in range(len(source))
    ] == rows

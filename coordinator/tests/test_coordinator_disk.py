"""Files of lines on a disk that fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from coordinator_disks import FullDisk
from hypothesis import given
from hypothesis import strategies as st

from scalerl_coordinator.disk import LineFile, replace, size_of_whole_lines


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 200_000), min_size=1, max_size=3), st.integers(0, 300_000)))
)
def test_lines_are_whole_and_none_that_was_written_is_lost(tmp_path_factory, appends) -> None:
    """Each append has lines of given lengths, on a disk with room for so many bytes; a failed one may lose its lines."""
    path = tmp_path_factory.mktemp("disk") / "lines"
    disk = FullDisk()
    file, written = LineFile(path, disk), b""
    for lengths, room in appends:
        lines = b"".join(b"%d" % (i % 10) * n + b"\n" for i, n in enumerate(lengths))
        disk.room = room
        try:
            file.append(lines)
        except OSError:
            assert room < len(lines)
            assert not file.continues
            text = path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            assert whole.startswith(written)
            assert (written + lines).startswith(text)
            written = whole  # the next append keeps the lines that are complete
        else:
            written += lines
            assert path.read_bytes() == written


@pytest.mark.parametrize(
    ("text", "size"), [(b"", 0), (b"a", 0), (b"a\n", 2), (b"a\nb", 2), (b"a\n" + b"b" * 200_000, 2)]
)
def test_partial_last_lines_do_not_count(tmp_path: Path, text: bytes, size: int) -> None:
    path = tmp_path / "lines"
    path.write_bytes(text)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert size_of_whole_lines(fd) == size
    finally:
        os.close(fd)


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace(path, "before", tmp_path / "staging")
    with pytest.raises(FileNotFoundError):
        replace(path, "after", tmp_path / "none" / "staging")
    assert path.read_text() == "before"
    replace(path, "ä", tmp_path / "staging")
    assert path.read_text() == "ä"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]

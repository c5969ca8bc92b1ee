"""Text: where it comes from, in which order, and what is refused."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from pager.tools.errors import InputError
from pager.tools.text import TextBatches, read_text


def test_the_default_is_the_english_documentation_of_python() -> None:
    text = bytes(read_text())
    assert len(text) > 300_000
    assert b'The "assert" statement' in text
    assert bytes(read_text()) == text


def test_a_file_is_read_as_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "poem"
    path.write_bytes("Grüße\n".encode())
    assert bytes(read_text(str(path))) == "Grüße\n".encode()


def test_a_folder_is_its_text_files_in_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.MD").write_text("first")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.py").write_text("third")
    (tmp_path / "empty.rst").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\0\0")
    assert bytes(read_text(str(tmp_path))) == b"first\n\nsecond\n\nthird"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "there is no such file or folder"),
        ("empty.txt", b"", "the file is empty"),
        ("binary.txt", b"abc\0def", r"is binary \(a zero byte at offset 3\)"),
    ],
)
def test_a_file_that_is_no_text_is_refused(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        read_text(str(path))
    assert str(path) in str(raised.value)


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match=r"pipe\.txt: neither a regular file nor a folder"):
        read_text(str(pipe))
    (tmp_path / "a.txt").write_bytes(b"beside the pipe")
    assert bytes(read_text(str(tmp_path))) == b"beside the pipe"


def test_no_name_is_not_the_folder_one_stands_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"not asked for")
    with pytest.raises(InputError, match="--text is empty text"):
        read_text("")


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\0")
    with pytest.raises(InputError, match=r"holds no \.txt, \.md, \.rst, \.py file"):
        read_text(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match="all 1 text files in the folder are empty"):
        read_text(str(tmp_path))


def test_a_binary_file_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"\0")
    with pytest.raises(InputError, match=r"b\.txt is binary"):
        read_text(str(tmp_path))


def test_batches_are_windows_with_the_next_byte_as_target() -> None:
    text = np.arange(200, dtype=np.uint8)
    inputs, targets = next(iter(TextBatches(text, batch=5, seq=7, seed=0)))
    assert inputs.shape == targets.shape == (5, 7)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(inputs + 1, targets)


def test_the_same_seed_gives_the_same_batches_and_another_seed_others() -> None:
    text = np.arange(250, dtype=np.uint8)
    first, again, other = (
        np.stack([inputs for inputs, _ in islice(TextBatches(text, batch=2, seq=8, seed=seed), 4)])
        for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_text_of_one_window_is_enough_and_a_shorter_one_is_refused() -> None:
    text = np.arange(9, dtype=np.uint8)
    inputs, targets = next(iter(TextBatches(text, batch=1, seq=8, seed=0)))
    assert inputs.tolist() == [list(range(8))]
    assert targets.tolist() == [list(range(1, 9))]
    with pytest.raises(InputError, match="the text has 8 bytes, too few for --seq 8"):
        TextBatches(text[:8], batch=1, seq=8, seed=0)

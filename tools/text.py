"""Real text as bytes: a file, a folder, or the text of Python's own documentation; and batches of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pager.tools.errors import InputError

__all__ = ["TextBatches", "read_text"]

SUFFIXES = (".txt", ".md", ".rst", ".py")

Bytes = NDArray[np.uint8]


def read_text(source: str | None = None) -> Bytes:
    """All of a text as a uint8 array.

    ``source`` is a file, a folder (all its .txt, .md, .rst and .py files, in order of their paths), or None:
    the topics of Python's documentation, which come with Python. Raises InputError for a missing, empty,
    unreadable or binary source, and for what is neither file nor folder.
    """
    if source is None:
        from pydoc_data.topics import topics

        return _as_array("\n\n".join(topics[name] for name in sorted(topics)).encode())
    if not source:
        raise InputError("--text is empty text; name a file or a folder, or leave it out")
    path = Path(source)
    if not path.exists():
        raise InputError(f"--text {source}: there is no such file or folder")
    if not path.is_dir():
        if not path.is_file():  # a pipe or a device: reading one may wait, or go on, for ever
            raise InputError(f"--text {source}: neither a regular file nor a folder")
        content = _read_file(path)
        if not content:
            raise InputError(f"--text {source}: the file is empty")
        return _as_array(content)
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise InputError(f"--text {source}: the folder holds no {', '.join(SUFFIXES)} file")
    content = b"\n\n".join(filter(None, map(_read_file, files)))
    if not content:
        raise InputError(f"--text {source}: all {len(files)} text files in the folder are empty")
    return _as_array(content)


def _read_file(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"--text: cannot read {path}: {error.strerror or error}") from error
    zero = content.find(b"\0")
    if zero >= 0:
        raise InputError(f"--text: {path} is binary (a zero byte at offset {zero}); expected text")
    return content


def _as_array(content: bytes) -> Bytes:
    return np.frombuffer(content, dtype=np.uint8)


class TextBatches:
    """An endless stream of batches drawn from one text: the same seed gives the same batches again."""

    def __init__(self, text: Bytes, *, batch: int, seq: int, seed: int) -> None:
        """``batch`` windows of ``seq`` bytes each. Raises InputError if the text is shorter than a window."""
        if len(text) < seq + 1:
            raise InputError(
                f"the text has {len(text)} bytes, too few for --seq {seq} (one window takes seq + 1 bytes); "
                "give a longer text or a smaller --seq"
            )
        self._text = text
        self._batch = batch
        self._seq = seq
        self._seed = seed

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Pairs (inputs, targets) of int64 arrays (batch, seq); a target is the byte after its input."""
        generator = np.random.default_rng(self._seed)
        window = np.arange(self._seq + 1)
        while True:
            starts = generator.integers(0, len(self._text) - self._seq, size=self._batch)
            rows = self._text[starts[:, None] + window].astype(np.int64)
            yield rows[:, :-1].copy(), rows[:, 1:].copy()

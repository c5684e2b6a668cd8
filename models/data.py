"""Text to batches: documents of bytes, packed into rows, in an order that only the seed decides."""

import dataclasses
import functools
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

import jaxcp

SEPARATOR = 256  # precedes each document; the symbols below are bytes
NOT_OURS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Packed text. Batches depend on (seed, step, size) alone: the mesh, strategy and layout change nothing."""

    rows: np.ndarray  # uint16 [rows, length]: the documents, joined and cut
    seed: int

    def batch(self, step: int, size: int, layout) -> dict[str, np.ndarray]:
        """`jaxcp.next_token_batch` of the `step`-th `size` rows, each document of a row a segment of its own."""
        numbers = range(step * size, (step + 1) * size)
        tokens = self.rows[[self._shuffled(n) for n in numbers]].astype(np.int32)
        segments = np.cumsum(tokens == SEPARATOR, axis=1)  # a document that began in an earlier row is segment 0
        return jaxcp.next_token_batch(tokens, layout=layout, segment_ids=segments)

    def _shuffled(self, n: int) -> int:
        epoch, place = divmod(n, len(self.rows))
        return _permutation(len(self.rows), self.seed, epoch)[place]


@functools.lru_cache(maxsize=2)
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n)


@functools.lru_cache(maxsize=1)
def load(paths: tuple[str, ...], length: int, seed: int) -> Rows:
    """The packed text of `paths`, or of Python's standard library; kept, for runs that share it."""
    return pack(read(paths), length, seed)


def pack(documents: Iterable[bytes], length: int, seed: int) -> Rows:
    """Joins the documents, cuts them into rows of `length` symbols, and leaves out what is too short for the last."""
    parts = []
    for document in documents:
        parts += [np.array([SEPARATOR], np.uint16), np.frombuffer(document, np.uint8).astype(np.uint16)]
    stream = np.concatenate(parts)
    count = len(stream) // length
    if not count:
        raise ValueError(
            f"the text is {len(stream)} symbols, less than a row of --seq-len {length}: give more text, or shorter rows"
        )
    return Rows(stream[: count * length].reshape(count, length), seed)


def read(paths: Sequence[str] = ()) -> list[bytes]:
    """The documents in `paths`, files and folders; without any, the source of Python's standard library."""
    return [document for path in paths for document in _documents(Path(path))] if paths else standard_library()


def standard_library() -> list[bytes]:
    """Its source without its tests, by name: long real documents, on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [file for file in sorted(root.rglob("*.py")) if NOT_OURS.isdisjoint(file.relative_to(root).parts)]
    if not found:
        raise ValueError(f"this Python has no source in {root}: name some text with --text")
    return [text for file in found if (text := _bytes(file))]


def _documents(path: Path) -> list[bytes]:
    """The file, or the files of text below the folder, by name and without those that are hidden or empty."""
    if path.is_dir():
        hidden = lambda file: any(part.startswith(".") for part in file.relative_to(path).parts)
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and not hidden(file)]
        found = [text for file in files if (text := _bytes(file)) and b"\0" not in text]
    else:
        found = [text] if (text := _bytes(path)) else []
    if not found:
        raise ValueError(f"--text {path}: there is no text in it")
    return found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"--text {path}: cannot be read ({error.strerror})") from error

"""Many image files: decoded once and kept where they fit in memory, else decoded on reading."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from os import cpu_count
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from vitlens.data.decode import Header, UnreadableError, decode_file, header_of, open_image, quiet_pillow
from vitlens.data.split import InMemory, Skipped, Source
from vitlens.errors import DataError
from vitlens.preprocessing import Preprocessing
from vitlens.shapes import Pixels

MEMORY_LIMIT = 1 << 30  # bytes of decoded pixels that are kept in memory
Progress = Callable[[int, int], None]  # called with (files done, files in all)

_BATCH = 64  # files a thread takes at a time
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}  # near the end of a complete file

Result = TypeVar("Result")


class Loaded(NamedTuple):
    """A source of the readable files; readable: their indices in the given list; skipped: the others, and why."""

    source: Source
    readable: tuple[int, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Files:
    """Image files that are decoded when they are read, in parallel; safe in the workers of a DataLoader."""

    paths: tuple[Path, ...]
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: Tensor) -> Pixels:
        """Pixels of these files. Raises DataError when one of them has become unreadable."""
        chosen = [self.paths[index] for index in indices.tolist()]
        pixels = _room(len(chosen), self.preprocessing)
        for path, result in zip(chosen, _decode_into(pixels, chosen, self.preprocessing)):
            if isinstance(result, UnreadableError):
                raise DataError(f"cannot read {path}: {result}; repair or remove it")
        return pixels


def load_files(
    paths: Sequence[Path],
    preprocessing: Preprocessing,
    *,
    memory: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> Loaded:
    """A source for image files; unreadable ones are left out and listed.

    Up to `memory` bytes of pixels are decoded now and kept as uint8. Above that, only each file's header and end are
    checked now, and pixels are decoded on reading. Raises DataError when no file can be read.
    """
    height, width = preprocessing.size
    eager = len(paths) * 3 * height * width <= memory
    pixels = _room(len(paths) if eager else 0, preprocessing)
    results = _decode_into(pixels, paths, preprocessing, progress) if eager else probe(paths, progress)
    headers = {index: header for index, header in enumerate(results) if isinstance(header, Header)}
    skipped = tuple(
        Skipped(str(path), str(why)) for path, why in zip(paths, results) if isinstance(why, UnreadableError)
    )
    if not headers:
        raise DataError(_none_readable(skipped))
    readable = tuple(headers)
    if eager:
        source: Source = InMemory(pixels if not skipped else pixels[list(readable)])
    else:
        source = Files(tuple(paths[index] for index in readable), preprocessing)
    return Loaded(source, readable, skipped, _count_notes(list(headers.values())))


def probe(paths: Sequence[Path], progress: Progress | None = None) -> list[Header | UnreadableError]:
    """Each file's header, or why it cannot be read.

    Pixels are decoded only where the end of the file is missing, or where its format has no end marker.
    """
    return _for_each(lambda _, path: _probe(path), paths, progress)


def _decode_into(
    pixels: Pixels, paths: Sequence[Path], preprocessing: Preprocessing, progress: Progress | None = None
) -> list[Header | UnreadableError]:
    """Decode file i into pixels[i]."""

    def decode(index: int, path: Path) -> Header | UnreadableError:
        try:
            pixels[index], header = decode_file(path, preprocessing)
        except UnreadableError as reason:
            return reason
        return header

    return _for_each(decode, paths, progress)


def _probe(path: Path) -> Header | UnreadableError:
    try:
        with open_image(path) as image:
            if not _ends_well(path, image.format):
                image.load()
            return header_of(image)
    except UnreadableError as reason:
        return reason


def _ends_well(path: Path, kind: str | None) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return kind in _ENDS and _ENDS[kind] in file.read()


def _for_each(
    work: Callable[[int, Path], Result], paths: Sequence[Path], progress: Progress | None = None
) -> list[Result]:
    """work(index, path) for every path, one thread per core (Pillow releases the GIL while it decodes)."""

    def batch(start: int) -> list[Result]:
        return [work(index, paths[index]) for index in range(start, min(start + _BATCH, len(paths)))]

    results: list[list[Result]] = []
    pool = ThreadPoolExecutor(cpu_count() or 1)
    try:
        with quiet_pillow():
            for part in pool.map(batch, range(0, len(paths), _BATCH)):
                results.append(part)
                if progress is not None:
                    progress(min(len(results) * _BATCH, len(paths)), len(paths))
    finally:
        pool.shutdown(cancel_futures=True)
    return list(chain.from_iterable(results))


def _room(count: int, preprocessing: Preprocessing) -> Pixels:
    with torch.inference_mode(False):  # threads write to it, which do not inherit inference mode
        return torch.empty(count, 3, *preprocessing.size, dtype=torch.uint8)


def _count_notes(headers: Sequence[Header]) -> tuple[str, ...]:
    counts = Counter(header.note for header in headers if header.note)
    return tuple(f"{count} of {len(headers)} images have {note}" for note, count in counts.items())


def _none_readable(skipped: Sequence[Skipped]) -> str:
    if not skipped:
        return "expected images, found none; see vitlens data"
    return f"expected readable images, found none among {len(skipped)}: {skipped[0].file}: {skipped[0].reason}"

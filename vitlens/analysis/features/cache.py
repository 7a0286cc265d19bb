"""Features on disk: one file per layer, written batch by batch, memory-mapped when read, identified by their origin.

A file's name is a hash of the origin of its content: weights, data, pooling, norm, precision, layer. A file that is
incomplete, damaged, of another origin or of another version is never read: the reason is given, and the file is built
again. Files appear whole or not at all, so runs can share a folder.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitlens.errors import InputError
from vitlens.files import write_atomically

VERSION = 1  # of the file format and of how features are read: raise it with any change of either
_TENSOR = "features"
_UNKNOWN = "0" * 64  # placeholder for the digest until the last row is written
_CHUNK = 1 << 22  # bytes hashed at a time


class Recalled(NamedTuple):
    """values (n, dim) mapped from the file, or None; reason: why an existing file is not used, else empty."""

    values: Tensor | None
    reason: str = ""


@dataclass(frozen=True)
class FeatureCache:
    """The features of one model on one set of images, read in one way.

    root: the cache's folder; about: the origin of the features as plain JSON values, without the layer.
    """

    root: Path
    about: Mapping[str, object]

    def __post_init__(self) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise InputError(f"expected a folder for cached features at {self.root}, found a file; give another")

    def file(self, name: str) -> Path:
        """The path of one layer's features, whether the file exists or not."""
        return self.root / hashlib.sha256(_as_json(self.about).encode()).hexdigest()[:20] / f"{name}.safetensors"

    def recall(self, name: str, *, rows: int, width: int | None = None) -> Recalled:
        """The features (rows, width) of one layer, if the file is complete and of this origin; width None: any."""
        path = self.file(name)
        if not path.exists():
            return Recalled(None)
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                reason = self._fault(path, metadata, name, list(file.keys()))
                if not reason:
                    values: Tensor = file.get_tensor(_TENSOR)
                    flat = values.ndim == 2 and values.dtype == torch.float32
                    fits = flat and values.shape == (rows, width or values.shape[-1])
                    return Recalled(values) if fits else Recalled(None, f"of another shape, {tuple(values.shape)}")
        except (SafetensorError, OSError) as error:
            reason = f"half-written or damaged ({error})"
        return Recalled(None, reason)

    @contextmanager
    def writing(self, name: str, *, rows: int, width: int) -> Iterator["Writer"]:
        """A writer of one layer's features; the file appears on disk when the block ends without an exception.

        Raises InputError when another number of rows was written, StorageError when the disk is full.
        """
        with write_atomically(self.file(name)) as temporary, temporary.open("wb") as file:
            writer = Writer(file, {"about": _as_json(self._named(name)), "version": str(VERSION)}, rows, width)
            yield writer
            writer.finish()

    def _named(self, name: str) -> dict[str, object]:
        return {**self.about, "layer": name}

    def _fault(self, path: Path, metadata: Mapping[str, str], name: str, tensors: list[str]) -> str:
        """Why a readable file does not hold the expected features, or "" if it does."""
        if "version" not in metadata or tensors != [_TENSOR]:
            return "of something else than features"
        if metadata["version"] != str(VERSION):
            return f"of version {metadata['version']}, not {VERSION}"
        if metadata.get("about") != _as_json(self._named(name)):
            return "of another model, data or layer"
        return "" if metadata.get("sha256") == _digest_of(path) else "damaged (its content is not what was written)"


class Writer:
    """Writes a safetensors file of one (rows, width) fp32 tensor row by row, its digest last, into the header."""

    def __init__(self, file: BinaryIO, metadata: Mapping[str, str], rows: int, width: int) -> None:
        self._file, self._rows, self._width, self._left = file, rows, width, rows
        tensor = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, 4 * rows * width]}
        header = json.dumps({"__metadata__": {**metadata, "sha256": _UNKNOWN}, _TENSOR: tensor}).encode()
        header += b" " * (-len(header) % 8)  # so that the numbers are aligned
        self._place = 8 + header.index(_UNKNOWN.encode())
        self._digest = hashlib.sha256()
        file.write(len(header).to_bytes(8, "little") + header)

    def add(self, values: Float[Tensor, "batch dim"]) -> None:
        """Append rows."""
        content = values.detach().float().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes()
        if values.shape[1] != self._width or len(values) > self._left:
            raise InputError(f"expected {self._left} more rows of {self._width}, found {tuple(values.shape)}")
        self._left -= len(values)
        self._digest.update(content)
        self._file.write(content)

    def finish(self) -> None:
        """Put the digest into the header. Raises InputError when rows are missing."""
        if self._left:
            raise InputError(f"expected {self._rows} rows, found {self._rows - self._left}")
        self._file.seek(self._place)
        self._file.write(self._digest.hexdigest().encode())


def _as_json(about: Mapping[str, object]) -> str:
    return json.dumps(about, sort_keys=True)


def _digest_of(path: Path) -> str:
    """The SHA-256 of the file's content after the header."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()

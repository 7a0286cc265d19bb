"""Files of cached features, one per layer.

A file is written batch by batch and memory-mapped when it is read. Its path is a hash of the origin
of its content: weights, data, pooling, norm, precision, layer. A file that is incomplete, damaged
or of another version is never read: a note says so, and the file is built again. Files appear
complete or not at all, so runs can share a folder.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.errors import InputError
from vitlens.files import write_atomically

VERSION = 3  # to be raised if the format of the files or the reading of features changes
_SEAL: Final = 32  # bytes at the end of a file: the SHA-256 that shows that it is complete


class FeatureCache:
    """The cached features of one model on one set of images.

    root: the folder of the cache.
    origin: all that the features depend on, except the layer, as JSON.
    """

    def __init__(self, root: Path, origin: Mapping[str, object]) -> None:
        if root.exists() and not root.is_dir():
            raise InputError(
                f"expected a folder for cached features at {root}, found a file; give another"
            )
        self.root = root
        self.origin = json.dumps(origin, sort_keys=True)

    def file(self, name: str) -> Path:
        """Return the path of one layer's features, whether the file exists or not."""
        key = hashlib.sha256(self.origin.encode()).hexdigest()[:20]
        return self.root / key / f"{name}.npy"

    def recall(self, names: Sequence[str]) -> tuple[dict[str, Tensor], list[str]]:
        """Return the cached features (n, dim) by the name of their layer, mapped from the files.

        Also return a note on every file that cannot be used.
        """
        cached = dict[str, Tensor]()
        notes = list[str]()
        for name in names:
            path = self.file(name)
            with suppress(OSError):  # a file that cannot be read counts as damaged
                content: NDArray[np.uint8] = np.zeros(0, np.uint8)
                if path.stat().st_size:  # an empty file cannot be mapped
                    content = np.memmap(path, np.uint8, "r")
                if content[-_SEAL:].tobytes() == self._seal(name, content[:-_SEAL]):
                    # copy on write: tensors are not read-only, but the file stays as it is
                    cached[name] = torch.from_numpy(np.lib.format.open_memmap(path, mode="c"))
            if path.exists() and name not in cached:
                notes.append(
                    f"cached features {path.relative_to(self.root)} were built again: "
                    "they were incomplete, damaged or of another version"
                )
        return cached, notes

    @contextmanager
    def writing(self, name: str, shape: tuple[int, int]) -> Iterator[BinaryIO]:
        """Yield a file that takes the fp32 rows of one layer.

        The file appears in the cache if the block ends without an exception. Raises StorageError if
        the disk is full.
        """
        with write_atomically(self.file(name)) as temporary, temporary.open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(file, header)
            yield file
            file.flush()  # the seal is computed from the file on the disk
            file.write(self._seal(name, np.memmap(temporary, np.uint8, "r")))

    def _seal(self, name: str, content: NDArray[np.uint8]) -> bytes:
        """Return the SHA-256 of a file's content, origin and version."""
        seal = hashlib.sha256(f"{VERSION} {name} {self.origin}".encode())
        seal.update(content.data)
        return seal.digest()

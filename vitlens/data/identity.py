"""What a split shows as one number, whatever it is called and wherever it lies: what a cache remembers of its data."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count

import torch
from torch import Tensor

from vitlens.data.reading import Files
from vitlens.data.split import Chosen, Source, Split
from vitlens.files import sha256

_AT_ONCE = 256  # images read at a time


def identity(split: Split) -> str:
    """SHA-256 of the images in their order. Labels, names and masks are left out.

    Images that are decoded when they are asked for are known by their files' content and by how they are decoded, so
    that nothing need be decoded; others by their pixels. The two give different numbers.
    """
    source, indices = _innermost(split.source, torch.arange(len(split)))
    digest = hashlib.sha256(str((len(split), split.size)).encode())
    if isinstance(source, Files):
        digest.update(repr(source.preprocessing).encode())
        paths = [source.paths[index] for index in indices.tolist()]
        with ThreadPoolExecutor(cpu_count() or 1) as threads:
            for found in threads.map(sha256, paths):
                digest.update(found.encode())
    else:
        for part in indices.split(_AT_ONCE):
            digest.update(source.read(part).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _innermost(source: Source, indices: Tensor) -> tuple[Source, Tensor]:
    """The source below all choices, and which of its images they are."""
    if isinstance(source, Chosen):
        return _innermost(source.source, source.indices[indices])
    return source, indices

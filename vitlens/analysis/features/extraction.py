"""Features of a whole split: read once, cached on disk, divided among processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.features.cache import FeatureCache, Writer
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.reader import FeatureReader
from vitlens.data.identity import split_fingerprint
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import DataError, InputError, StorageError
from vitlens.models.identity import model_fingerprint
from vitlens.models.model import Model
from vitlens.names import FeaturePool
from vitlens.processes import Processes


def extract(
    model: Model,
    split: Split,
    *,
    layer: int | Sequence[int] | None = None,
    pool: FeaturePool | None = None,
    norm: bool = True,
    embedding: bool = False,
    cache: Path | None = None,
    batch_size: int | None = None,
    precision: str = "fp32",
    processes: Processes | None = None,
    advance: Callable[[int], object] = lambda _: None,
    say: Callable[[str], object] = lambda _: None,
) -> Features | None:
    """The features of every image of a split, as `features` reads them; cached layers are not computed again.

    cache: a folder, created if missing, which runs may share: every layer is written to it batch by batch and then
    memory-mapped, so that memory does not grow with the images; None: all is held in memory. processes: each is given
    the whole split and reads its share; all but the first return None. advance: called with the number of images just
    done; say: called with one line for every cached file that was ignored (the result's notes hold the same lines).
    Raises what `features` raises, DataError for a split without images, InputError for more processes than images.
    """
    all_processes = processes or Processes(0, 1, model.device)
    _require_images(split, all_processes)
    reader = FeatureReader(model, layer=layer, pool=pool, norm=norm, embedding=embedding)
    feature_pass = _Pass(split, all_processes, batch_size or fitting_batch_size(model), precision)
    if cache is None:
        return _in_memory(reader, feature_pass, advance)
    feature_cache = _cache_of(cache, reader, feature_pass, norm=norm) if all_processes.is_first else None
    names = _names(reader)
    cached, notes = _recall(feature_cache, names, reader, feature_pass)
    for note in notes:
        say(note)
    absent = torch.tensor([float(feature_cache is not None and name not in cached) for name in names])
    missing = {name for name, lacks in zip(names, all_processes.total(absent).tolist()) if lacks}
    if missing:  # in all processes alike
        absent_layers = [layer.index for layer, name in zip(reader.layers, names) if name in missing]
        numbers, embedded = [index for index in absent_layers if index is not None], None in absent_layers
        _write_missing(
            FeatureReader(model, layer=numbers, pool=reader.pool, norm=norm, embedding=embedded),
            feature_pass,
            feature_cache,
            missing,
            advance,
        )
    else:
        advance(len(range(all_processes.index, len(split), all_processes.count)))
    if feature_cache is None:
        return None
    cached, reasons = _recall(feature_cache, names, reader, feature_pass)
    if len(cached) < len(names):
        raise StorageError(f"expected the features just written in {cache}, found {'; '.join(reasons) or 'no files'}")
    *values, logits = (cached[name] for name in names)
    return Features(model.alias, reader.layers, tuple(values), logits, reader.pool, tuple(notes))


@dataclass(frozen=True)
class _Pass:
    """One pass over a split; size: images at a time in each process."""

    split: Split
    processes: Processes
    size: int
    precision: str

    def rows(self, reader: FeatureReader, advance: Callable[[int], object]) -> Iterator[Sequence[Tensor]]:
        """All processes' features chunk by chunk in the images' order: (chunk, dim) by layer, and the logits last."""
        index, count = self.processes.index, self.processes.count
        device, widths = reader.model.device, [0]
        for chunk in torch.arange(len(self.split)).split(self.size * count):
            share = chunk[index::count]
            joined = torch.zeros(0, sum(widths))  # the last chunk may have no image for this process
            for batch in self.split.pick(share).batches(self.size, device=device) if len(share) else ():
                with autocast(device, self.precision):
                    read = reader.read(batch.images)
                widths = [part.shape[1] for part in (*read.vectors, read.logits)]
                joined = torch.cat((*read.vectors, read.logits), 1)
            whole = self.processes.gathered(joined)
            advance(len(share))
            yield whole.split(widths, 1)


def _in_memory(reader: FeatureReader, feature_pass: _Pass, advance: Callable[[int], object]) -> Features | None:
    chunks = [parts for parts in feature_pass.rows(reader, advance) if feature_pass.processes.is_first]
    if not chunks:
        return None
    *values, logits = (torch.cat(parts) for parts in zip(*chunks))
    return Features(reader.model.alias, reader.layers, tuple(values), logits, reader.pool)


def _cache_of(cache: Path, reader: FeatureReader, feature_pass: _Pass, *, norm: bool) -> FeatureCache:
    exact = isinstance(autocast(reader.model.device, feature_pass.precision), nullcontext)
    about = {
        "model": model_fingerprint(reader.model),
        "data": split_fingerprint(feature_pass.split),
        "pool": reader.pool,
        "norm": norm,
        "precision": "fp32" if exact else "bf16",
    }
    return FeatureCache(cache, about)


def _names(reader: FeatureReader) -> list[str]:
    """The names of the files of a pass: its layers, and the logits last."""
    return [*(layer.title.replace(" ", "-") for layer in reader.layers), "logits"]


def _recall(
    feature_cache: FeatureCache | None, names: Sequence[str], reader: FeatureReader, feature_pass: _Pass
) -> tuple[dict[str, Tensor], list[str]]:
    """The cached tensors by name, and one line for each existing file that is not used."""
    cached: dict[str, Tensor] = {}
    notes: list[str] = []
    widths = [*(layer.dim for layer in reader.layers), None]
    for name, width in zip(names, widths):
        if feature_cache is None:
            break
        recalled = feature_cache.recall(name, rows=len(feature_pass.split), width=width)
        if recalled.values is not None:
            cached[name] = recalled.values
        elif recalled.reason:
            file = feature_cache.file(name).relative_to(feature_cache.root)
            notes.append(f"cached features {file} ignored and built again: {recalled.reason}")
    return cached, notes


def _write_missing(
    reader: FeatureReader,
    feature_pass: _Pass,
    feature_cache: FeatureCache | None,
    missing: set[str],
    advance: Callable[[int], object],
) -> None:
    """Compute the missing layers and write them batch by batch: every process computes, the first writes."""
    names, writers = _names(reader), dict[str, Writer]()
    with ExitStack() as stack:
        for parts in feature_pass.rows(reader, advance):
            for name, part in zip(names, parts):
                if feature_cache is None or name not in missing:
                    continue
                if name not in writers:
                    writer = feature_cache.writing(name, rows=len(feature_pass.split), width=part.shape[1])
                    writers[name] = stack.enter_context(writer)
                writers[name].add(part)


def _require_images(split: Split, processes: Processes) -> None:
    if not len(split):
        raise DataError(f"expected at least one image, found none in {split.name}")
    if len(split) < processes.count:
        raise InputError(
            f"expected an image for each of {processes.count} processes, found {len(split)}; start fewer processes"
        )

"""Features of a whole split: read once, cached on disk, divided among processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
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
    cache: Path | None = None,
    batch_size: int | None = None,
    precision: str = "fp32",
    processes: Processes | None = None,
    advance: Callable[[int], object] = lambda _: None,
    say: Callable[[str], object] = lambda _: None,
) -> Features | None:
    """The features of every image of a split, as `features` reads them; what a cache already has is not read again.

    cache: a folder, made when it is missing, which runs may share: every layer is written to it as it comes and then
    memory-mapped, so that memory does not grow with the images; None: all is held in memory. processes: each is given
    the whole split and reads its share; all but the first get None. advance: called with the number of images just
    done; say: called with a line on every file of the cache that was not used (and so are the features' notes). Raises
    what `features` raises, DataError for a split without images, InputError for more processes than images.
    """
    all_processes = processes or Processes(0, 1, model.device)
    _require_images(split, all_processes)
    reader = FeatureReader(model, layer=layer, pool=pool, norm=norm)
    work = _Pass(split, all_processes, batch_size or fitting_batch_size(model), precision)
    if cache is None:
        return _in_memory(reader, work, advance)
    shelf = _cache_of(cache, reader, work, norm=norm) if all_processes.is_first else None
    names = _names(reader)
    found, notes = _recall(shelf, names, reader, work)
    for note in notes:
        say(note)
    lacking = torch.tensor([float(shelf is not None and name not in found) for name in names])
    missing = {name for name, lacks in zip(names, all_processes.total(lacking).tolist()) if lacks}
    if missing:  # in all processes alike
        layers = [layer.index for layer, name in zip(reader.layers, names) if name in missing]
        _keep(FeatureReader(model, layer=layers, pool=reader.pool, norm=norm), work, shelf, missing, advance)
    else:
        advance(len(range(all_processes.index, len(split), all_processes.count)))
    if shelf is None:
        return None
    found, again = _recall(shelf, names, reader, work)
    if len(found) < len(names):
        raise StorageError(f"expected the features just written in {cache}, found {'; '.join(again) or 'them gone'}")
    *values, logits = (found[name] for name in names)
    return Features(model.alias, reader.layers, tuple(values), logits, reader.pool, tuple(notes))


@dataclass(frozen=True)
class _Pass:
    """One pass over a split, size images at a time in each process."""

    split: Split
    processes: Processes
    size: int
    precision: str

    def rows(self, reader: FeatureReader, advance: Callable[[int], object]) -> Iterator[Sequence[Tensor]]:
        """Chunk after chunk in the images' order, in all processes: (chunk, dim) by layer, and the logits last."""
        index, count = self.processes.index, self.processes.count
        device, widths = reader.model.device, [0]
        for chunk in torch.arange(len(self.split)).split(self.size * count):
            mine = chunk[index::count]
            joined = torch.zeros(0, sum(widths))  # the last chunk may have no image for this process, the first has
            for batch in self.split.pick(mine).batches(self.size, device=device) if len(mine) else ():
                with autocast(device, self.precision):
                    read = reader.read(batch.images)
                widths = [part.shape[1] for part in (*read.vectors, read.logits)]
                joined = torch.cat((*read.vectors, read.logits), 1)
            whole = self.processes.gathered(joined)
            advance(len(mine))
            yield whole.split(widths, 1)


def _in_memory(reader: FeatureReader, work: _Pass, advance: Callable[[int], object]) -> Features | None:
    chunks = [parts for parts in work.rows(reader, advance) if work.processes.is_first]
    if not chunks:
        return None
    *values, logits = (torch.cat(parts) for parts in zip(*chunks))
    return Features(reader.model.alias, reader.layers, tuple(values), logits, reader.pool)


def _cache_of(cache: Path, reader: FeatureReader, work: _Pass, *, norm: bool) -> FeatureCache:
    exact = isinstance(autocast(reader.model.device, work.precision), nullcontext)
    about = {
        "model": model_fingerprint(reader.model),
        "data": split_fingerprint(work.split),
        "pool": reader.pool,
        "norm": norm,
        "precision": "fp32" if exact else "bf16",
    }
    return FeatureCache(cache, about)


def _names(reader: FeatureReader) -> list[str]:
    """What a pass is kept as: its layers, and the logits last."""
    return [*(f"{layer.kind}-{layer.index}" for layer in reader.layers), "logits"]


def _recall(
    shelf: FeatureCache | None, names: Sequence[str], reader: FeatureReader, work: _Pass
) -> tuple[dict[str, Tensor], list[str]]:
    """What the cache has, by name, and a line on each file that it has and that is not used."""
    found: dict[str, Tensor] = {}
    notes: list[str] = []
    widths = [*(layer.dim for layer in reader.layers), None]
    for name, width in zip(names, widths):
        if shelf is None:
            break
        recalled = shelf.recall(name, rows=len(work.split), width=width)
        if recalled.values is not None:
            found[name] = recalled.values
        elif recalled.reason:
            notes.append(
                f"cached features {shelf.file(name).relative_to(shelf.root)} ignored and built again: {recalled.reason}"
            )
    return found, notes


def _keep(
    reader: FeatureReader, work: _Pass, shelf: FeatureCache | None, missing: set[str], advance: Callable[[int], object]
) -> None:
    """Read what is missing and write it as it comes: every process reads, the first writes."""
    names, writers = _names(reader), dict[str, Writer]()
    with ExitStack() as stack:
        for parts in work.rows(reader, advance):
            for name, part in zip(names, parts):
                if shelf is None or name not in missing:
                    continue
                if name not in writers:
                    room = shelf.writing(name, rows=len(work.split), width=part.shape[1])
                    writers[name] = stack.enter_context(room)
                writers[name].add(part)


def _require_images(split: Split, processes: Processes) -> None:
    if not len(split):
        raise DataError(f"expected at least one image, found none in {split.name}")
    if len(split) < processes.count:
        raise InputError(
            f"expected an image for each of {processes.count} processes, found {len(split)}; start fewer processes"
        )

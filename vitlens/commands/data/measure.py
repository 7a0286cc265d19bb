"""The lines that `vitlens data` prints: all named data sets, or the parts of one of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from vitlens.commands.data.options import DataOptions
from vitlens.data.catalogue import load_data
from vitlens.data.registry import LAYOUTS, SETS
from vitlens.data.split import Skipped, Split
from vitlens.errors import DataError

_LISTED: Final = 10  # classes whose names are printed, at most


def measure(options: DataOptions) -> Iterator[str]:
    """Return lines on all named data sets, or on the parts of one set, folder or .npz.

    Raises UnknownNameError and DataError.
    """
    if options.name is None:
        yield from _named_sets()
        return
    load = partial(load_data, options.name, data_dir=options.data_dir, labels=options.labels)
    yield from _parts(load)


def _named_sets() -> Iterator[str]:
    """Yield a line for each named data set, then one for each form of a user's own data."""
    for info in SETS.values():
        size = f"{info.size[0]}x{info.size[1]} px" if info.size else "sizes differ"
        storage = "downloaded once" if info.download else "embedded"
        yield f"{info.name:<16} {info.classes:>4} classes  {size:<13} {info.origin}, {storage}"
    for layout in LAYOUTS:
        if layout.usage:
            yield f"{layout.usage:<16} {layout.help}"


def _parts(load: Callable[..., Split]) -> Iterator[str]:
    """Yield lines on the parts of one data set.

    load: `load_data` of this data set; it takes `part` and `whole`.
    """
    all_images = load(part="test", whole=True)
    parts = {"all": all_images}
    with suppress(DataError):  # a folder that cannot be divided, or has no training part
        if all_images.labels is not None:
            training = load(part="train")
            parts = {"train": training, "test": load(part="test")}
    yield f"{all_images.title or all_images.name}: {_class_words(all_images.classes)}"
    for part, split in parts.items():
        extras = []
        if split.labels is not None:
            extras.append("labels")
        if split.masks is not None:
            extras.append("masks")
        line = f"{part}: {len(split):,} images of {split.size[0]}x{split.size[1]} px"
        if extras:
            line += f", with {' and '.join(extras)}"
        yield line
    notes: list[str] = []
    skipped_files: list[Skipped] = []
    for split in parts.values():
        notes += split.notes
        skipped_files += split.skipped
    # parts share notes and skipped files: each is printed once
    for note in dict.fromkeys(notes):
        yield f"note: {note}"
    for skipped in dict.fromkeys(skipped_files):
        yield f"skipped {skipped.file}: {skipped.reason}"


def _class_words(classes: Sequence[str]) -> str:
    """Return the number of classes and the first ones."""
    if not classes:
        return "no labels"
    listed = ", ".join(classes[:_LISTED])
    if len(classes) > _LISTED:
        listed += " ..."
    return f"{len(classes)} classes ({listed})"

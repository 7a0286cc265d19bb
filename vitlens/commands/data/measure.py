"""The lines that `vitlens data` prints: all named data sets, or the parts of one of them."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from vitlens.commands.data.options import DataOptions
from vitlens.data.catalogue import load_data
from vitlens.data.registry import LAYOUTS, SETS
from vitlens.data.split import Split
from vitlens.errors import DataError


def measure(options: DataOptions) -> Iterator[str]:
    """Return lines on all named data sets, or on the parts of one set, folder or .npz.

    Raises UnknownNameError and DataError.
    """
    if options.name is not None:
        yield from _parts(
            partial(load_data, options.name, data_dir=options.data_dir, labels=options.labels)
        )
        return
    for info in SETS.values():
        size = f"{info.size[0]}x{info.size[1]} px" if info.size else "sizes differ"
        where = f"{info.origin}, downloaded once" if info.download else f"{info.origin}, embedded"
        yield f"{info.name:<16} {info.classes:>4} classes  {size:<13} {where}"
    yield from (f"{layout.usage:<16} {layout.help}" for layout in LAYOUTS if layout.usage)


def _parts(load: Callable[..., Split]) -> Iterator[str]:
    all_images = load(part="test", whole=True)
    parts = {"all": all_images}
    with suppress(DataError):  # a folder that cannot be divided, or has no training part
        if all_images.labels is not None:
            training = load(part="train")
            parts = {"train": training, "test": load(part="test")}
    classes = all_images.classes
    class_list = ", ".join(classes[:10]) + (" ..." if len(classes) > 10 else "")
    labels = f"{len(classes)} classes ({class_list})" if classes else "no labels"
    yield f"{all_images.title or all_images.name}: {labels}"
    for part, split in parts.items():
        extras = [
            name
            for name, values in (("labels", split.labels), ("masks", split.masks))
            if values is not None
        ]
        with_ = f", with {' and '.join(extras)}" if extras else ""
        yield f"{part}: {len(split):,} images of {split.size[0]}x{split.size[1]} px{with_}"
    for note in dict.fromkeys(note for split in parts.values() for note in split.notes):
        yield f"note: {note}"
    for skipped in dict.fromkeys(skipped for split in parts.values() for skipped in split.skipped):
        yield f"skipped {skipped.file}: {skipped.reason}"

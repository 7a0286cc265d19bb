"""The lines that `vitlens data` prints: all named data sets, or the parts of one of them."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vitlens.commands.data.options import DataOptions
from vitlens.data.catalogue import load_data
from vitlens.data.registry import LAYOUTS, SETS
from vitlens.errors import DataError


def measure(options: DataOptions) -> Iterator[str]:
    """Lines: all named data sets, or the parts of one set, folder or .npz. Raises UnknownNameError and DataError."""
    if options.name is not None:
        yield from _parts(options.name, options.data_dir)
        return
    for info in SETS.values():
        size = f"{info.size[0]}x{info.size[1]} px" if info.size else "sizes differ"
        where = f"{info.origin}, downloaded once" if info.download else f"{info.origin}, embedded"
        yield f"{info.name:<16} {info.classes:>4} classes  {size:<13} {where}"
    yield from (f"{layout.usage:<16} {layout.help}" for layout in LAYOUTS if layout.usage)


def _parts(name: str, data_dir: Path) -> Iterator[str]:
    whole = load_data(name, part="test", data_dir=data_dir, whole=True)
    parts = {"all": whole}
    with suppress(DataError):  # a folder that cannot be divided, or has no training part
        if whole.labels is not None:
            training = load_data(name, part="train", data_dir=data_dir)
            parts = {"train": training, "test": load_data(name, part="test", data_dir=data_dir)}
    classes = whole.classes
    shown = ", ".join(classes[:10]) + (" ..." if len(classes) > 10 else "")
    yield f"{whole.title or whole.name}: {f'{len(classes)} classes ({shown})' if classes else 'no labels'}"
    for part, split in parts.items():
        extras = [name for name, values in (("labels", split.labels), ("masks", split.masks)) if values is not None]
        with_ = f", with {' and '.join(extras)}" if extras else ""
        yield f"{part}: {len(split):,} images of {split.size[0]}x{split.size[1]} px{with_}"
    for skipped in dict.fromkeys(skipped for split in parts.values() for skipped in split.skipped):
        yield f"skipped {skipped.file}: {skipped.reason}"

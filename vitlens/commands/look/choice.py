"""The model and the images of `vitlens look`, from what the user names and what is on the disk."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from vitlens.commands.look.options import LookOptions
from vitlens.commands.run.load import load_split
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.progress import progress
from vitlens.data.decode import Header, probe
from vitlens.data.folder import list_images
from vitlens.data.split import Split
from vitlens.display import for_terminal
from vitlens.errors import DataError, InputError, ModelError
from vitlens.models.model import Model
from vitlens.models.model_names import ModelName, parse_model
from vitlens.models.sources.hub import SMALL_VIT_SIZE, download_small_vit, vits_on_disk
from vitlens.names import BUNDLED

MOST: Final = 8  # the largest number of images without --limit
ANOTHER: Final = "--model timm:NAME (see vitlens models) takes another"
_MOST_FAULTS: Final = 3  # in an error message


def require_model(options: LookOptions) -> None:
    """Raise InputError for options of weights without a model."""
    # of the options of a model, only --classes is allowed without --model
    allowed = ModelOptions(classes=options.model_options.classes)
    if options.model is None and options.model_options != allowed:
        raise InputError(
            "expected --model with options for your weights, found no --model; add --model NAME"
        )


def choose_model(options: LookOptions) -> tuple[ModelName, str]:
    """Return the model's name, and why it was chosen ("" if the user named it).

    Without a name it is the smallest ViT in the hubs' caches, else DeiT-tiny, which is downloaded,
    else the bundled ViT of digits.
    """
    if options.model is not None:
        return parse_model(options.model), ""
    on_disk = vits_on_disk()
    if not on_disk:
        return _download_default(quiet=options.run.quiet)
    smallest = min(on_disk, key=lambda name: Path(name.weights or "").stat().st_size)
    reason = (
        f"takes {smallest.name}, the smallest of timm's ViTs whose weights are on this disk; "
        f"{ANOTHER}"
    )
    return smallest, reason


def _download_default(*, quiet: bool) -> tuple[ModelName, str]:
    """Download DeiT-tiny, or take the bundled ViT of digits if that fails."""

    def announce(address: str) -> None:
        print_line(
            f"downloads DeiT-tiny, a ViT of ImageNet's 1000 classes ({SMALL_VIT_SIZE} MB from "
            f"{address}), once; --offline never does",
            quiet=quiet,
        )

    try:
        bar = partial(progress, "Downloading DeiT-tiny", unit="MB", quiet=quiet)
        name = download_small_vit(begins=announce, progress=bar)
    except ModelError as error:
        bundled = BUNDLED[0]
        reason = (
            f"takes {bundled}, which comes with vitlens and knows only the digits 0 to "
            f"9, because no weights of timm's ViTs are on this disk and {error}; "
            f"{ANOTHER}"
        )
        return parse_model(bundled), reason
    return name, f"takes {name.name}, which it downloaded; {ANOTHER}"


def print_line(line: str, *, quiet: bool) -> None:
    """Print a line on standard error."""
    if not quiet:
        print(for_terminal(line), file=sys.stderr)  # noqa: T201


@dataclass
class ImageFiles:
    """Image files, of which headers are read until there are enough images.

    files: all files that the user named, alone or by their folder.
    checked: the number of first files that were read.
    readable: those of them that are images.
    faults: a line for each other file.
    """

    files: list[Path] = field(default_factory=list)
    checked: int = 0
    readable: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, path: str) -> None:
        """Add a file, or the images in a folder."""
        try:
            self.files += list_images([Path(path).expanduser()])
        except DataError as error:
            self.faults.append(str(error))

    def check(self, count: int) -> None:
        """Read the headers of the next `count` files."""
        files = self.files[self.checked : self.checked + count]
        self.checked += len(files)
        for file, result in zip(files, probe(files)):
            if isinstance(result, Header):
                self.readable.append(str(file))
            else:  # the reason why the file is no image
                self.faults.append(f"{file}: {result}")


def find_images(paths: Sequence[str], run: RunOptions) -> ImageFiles:
    """Return the image files of a look, checked until --limit or MOST of them are readable.

    Raises DataError if no file is an image.
    """
    most = run.limit or MOST
    images = ImageFiles()
    for path in paths:
        images.add(path)
    while len(images.readable) < most and images.checked < len(images.files):
        images.check(most - len(images.readable))  # never more readable images than are looked at
    if not images.readable:
        faults = "; ".join(images.faults[:_MOST_FAULTS])
        if len(images.faults) == 1:
            raise DataError(faults)  # which says what was expected, and what was found
        raise DataError(f"expected at least one image, found none: {faults}")
    return images


def readable_images(images: ImageFiles, model: Model, run: RunOptions) -> Split:
    """Return the first images that can be read, at most --limit or MOST.

    Every file that is no image is reported on stderr, a line each.
    """
    most = run.limit or MOST
    split = load_split(
        model, options=replace(run, limit=None, quiet=True), images=images.readable[:most]
    )
    for skipped in split.skipped:
        images.faults.append(f"{skipped.file}: {skipped.reason}")
    for fault in images.faults:
        print_line(f"left out {fault}", quiet=run.quiet)
    are_all_checked = images.checked == len(images.files)
    if are_all_checked:
        return split
    note = f"the first {len(split)} images of {len(images.files)} files"
    print_line(f"looks at {note}; --limit N takes more", quiet=run.quiet)
    return replace(split, notes=(*split.notes, note))

"""The images and layers of `vitlens attention`: those of the options, or the images of an earlier
folder.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vitlens.analysis.attention.weights import LayerMaps
from vitlens.commands.attention.options import ALL, AttentionOptions
from vitlens.commands.attention.record import AttentionRecord
from vitlens.commands.run.load import load_split
from vitlens.commands.run.publish import read_folder
from vitlens.commands.run.run import Run
from vitlens.commands.shared.sheets import DRAWN, left_out_words, print_left_out
from vitlens.data.identity import image_numbers
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.model import Model


def read_earlier(folder: Path) -> AttentionRecord:
    """Return the record of an earlier folder.

    Raises InputError if it does not name the images that it measured.
    """
    record = read_folder(folder)
    if not isinstance(record, AttentionRecord):
        raise InputError(
            f"expected --same-as with a folder of attention, found one of {record.command} in "
            f"{folder}"
        )
    if not record.shown or not all(row.content for row in record.shown):
        raise InputError(
            "expected --same-as with a folder that says which images it measured, found none of "
            f"them in {folder}; run its attention again"
        )
    return record


def with_images_of(earlier: AttentionRecord, options: AttentionOptions) -> AttentionOptions:
    """Return the options with the data or the image files of an earlier run."""
    images = earlier.options.get("images") or ()
    return replace(options, data=earlier.options.get("data"), images=tuple(images))


def choose_images(run: Run[AttentionOptions], earlier: AttentionRecord | None) -> Split:
    """Return the images of an earlier record, or --limit or at most DRAWN of those of the
    options."""
    options = run.options
    unlimited = replace(run.run, limit=None)
    every = load_split(run.model, options=unlimited, data=options.data, images=options.images)
    if earlier is not None:
        split = _same_images(earlier, every, run.model)
    elif options.run.limit is None and options.images:
        split = every.pick(torch.arange(min(DRAWN, len(every))))
    else:
        split = every.limit(options.run.limit or DRAWN, seed=options.run.seed)
    print_left_out(
        len(split), len(every), quiet=run.run.quiet, more="--limit N measures and draws more"
    )
    return replace(split, notes=(*every.notes, *left_out_words(len(split), len(every))))


def _same_images(earlier: AttentionRecord, every: Split, model: Model) -> Split:
    """Return the images of an earlier record in its order, found by content among those of the
    model.

    Raises InputError if some of them are missing.
    """
    places: dict[str, list[int]] = {}
    for index, content in enumerate(contents_of(every)):
        places.setdefault(content, []).append(index)
    indices = []
    for row in earlier.shown:
        remaining = places.get(row.content)
        if remaining:
            indices.append(remaining.pop(0))
    if len(indices) < len(earlier.shown):
        raise InputError(
            f"expected the {len(earlier.shown)} images of {earlier.folder} among those that "
            f"{model.alias} is measured on, found {len(indices)}; measure first the model that was "
            "trained on some of the images, and name its folder"
        )
    return every.pick(torch.tensor(indices))


def contents_of(split: Split) -> list[str]:
    """Return a number for the content of each image, in hexadecimal digits."""
    return [f"{number:016x}" for number in image_numbers(split).tolist()]


def require_layers(layers: Sequence[LayerMaps], options: AttentionOptions) -> None:
    """Raise InputError for a layer of --layer or --layers that has no map."""
    if options.layer is not None:
        _require_layer(layers, options.layer, "--layer")
    if options.layers != (ALL,):
        for number in options.layers:
            _require_layer(layers, int(number), "--layers")


def _require_layer(layers: Sequence[LayerMaps], number: int, option: str) -> None:
    known = [layer.site.layer for layer in layers]
    if number in known:
        return
    if known == list(range(len(known))):
        words = f"from 0 to {known[-1]}"
    else:
        numbers = ", ".join(map(str, dict.fromkeys(known)))
        words = f"one of {numbers}"
    raise InputError(f"expected {option} with a layer {words}, found {number}")

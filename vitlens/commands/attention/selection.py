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
from vitlens.commands.shared.sheets import DRAWN, print_left_out, unmeasured_words
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
    """Return the images of an earlier record, or else those of the options.

    Without an earlier record, they are at most --limit images, by default at most DRAWN.
    """
    options = run.options
    unlimited = replace(run.run_options, limit=None)
    all_images = load_split(run.model, options=unlimited, data=options.data, images=options.images)
    if earlier is not None:
        split = _same_images(earlier, all_images, run.model)
    elif options.run.limit is None and options.images:  # named files: the first ones
        split = all_images.pick(torch.arange(min(DRAWN, len(all_images))))
    else:
        split = all_images.limit(options.run.limit or DRAWN, seed=options.run.seed)
    left_out = tuple(unmeasured_words(len(split), len(all_images)))
    print_left_out(left_out, quiet=run.run_options.quiet, more="--limit N measures and draws more")
    return replace(split, notes=(*all_images.notes, *left_out))


def _same_images(earlier: AttentionRecord, all_images: Split, model: Model) -> Split:
    """Return the images of an earlier record in its order, found by content among those of the
    model.

    Raises InputError if some of them are missing.
    """
    unused_indices: dict[str, list[int]] = {}  # by content; several if images are the same
    for index, content in enumerate(contents_of(all_images)):
        unused_indices.setdefault(content, []).append(index)
    indices = []
    for row in earlier.shown:
        candidates = unused_indices.get(row.content)
        if candidates:
            indices.append(candidates.pop(0))
    if len(indices) < len(earlier.shown):
        raise InputError(
            f"expected the {len(earlier.shown)} images of {earlier.folder} among those "
            f"that {model.alias} is measured on, found {len(indices)}; first measure the "
            "model that was trained on some of the images, and give its folder"
        )
    return all_images.pick(torch.tensor(indices))


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
    numbers_with_map = [layer.site.layer for layer in layers]
    if number in numbers_with_map:
        return
    if numbers_with_map == list(range(len(numbers_with_map))):
        words = f"from 0 to {numbers_with_map[-1]}"
    else:
        numbers = ", ".join(map(str, dict.fromkeys(numbers_with_map)))
        words = f"one of {numbers}"
    raise InputError(f"expected {option} with a layer {words}, found {number}")

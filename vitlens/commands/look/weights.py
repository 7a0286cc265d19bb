"""The report of attention weights that are given as an array, without their model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from vitlens.analysis.attention.map_checks import map_bits
from vitlens.commands.look.options import LookOptions
from vitlens.commands.look.record import GivenArrays, GivenLayerRow, GivenRow, LookRecord
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.options import ModelOptions
from vitlens.commands.run.publish import publish
from vitlens.commands.shared.explorer import sink_rows
from vitlens.commands.shared.explorer_measure import (
    GivenAttention,
    given_attention,
    picture_of,
    read_attention,
)
from vitlens.errors import InputError

NAME: Final = "attention"  # of the weights, in the place of a model's alias
_SMALLEST: Final = 1e-30  # sum of weights that a mean is divided by


def look_at_weights(options: LookOptions, file: Path) -> Path:
    """Show attention weights on their image, and write the report; returns the report's path.

    Raises InputError unless there is one image and no model, and for weights that cannot be shown.
    """
    image = _only_image(options)
    weights = read_attention(file)
    measured = given_attention(weights, prefix=options.prefix, name=NAME, option="--prefix")
    pixels = picture_of(image)
    run = options.run
    title = f"Attention weights in {file.name}"
    config = settings(options, run)
    with RunFolder.opened("look", run, config, name_parts=(NAME,), title=title) as folder:
        layers, heads, tokens, _ = weights.shape
        row = GivenRow(
            file=file.name,
            image=Path(image).name,
            layers=layers,
            heads=heads,
            tokens=tokens,
            prefix=measured.prefix,
            found=options.prefix is None,
            rows=measured.rows,
            off=measured.off,
            least=measured.least,
            most=measured.most,
        )
        record = LookRecord(
            given=(row,),
            given_layers=tuple(_layer_rows(measured)),
            explorer=(measured.row,),
            given_maps=GivenArrays(pixels[None], _layer_maps(measured)),
            explorer_arrays={NAME: measured.arrays},
        )
        folder.keep(record)
        return publish(folder)


def _only_image(options: LookOptions) -> str:
    """Return the one image of the weights.

    Raises InputError for none, for several and for a model.
    """
    if options.model is not None or options.model_options != ModelOptions():
        raise InputError(
            "expected --attention or --model, found both: the weights take the place of "
            "a model; leave out --model"
        )
    images = list(options.images)
    if options.image is not None:
        images.append(options.image)
    if len(images) != 1:
        raise InputError(
            "expected the one image of the weights with --attention, found "
            f"{len(images)}; add --image FILE"
        )
    return images[0]


def _layer_maps(measured: GivenAttention) -> NDArray[np.float32]:
    """Return a map of each layer (layers, rows, columns).

    It is the attention of the first prefix token, or the mean of all tokens without a prefix.
    """
    if measured.prefix:
        attention = measured.means[:, 0]  # means (layers, queries, keys)
    else:
        attention = measured.means.mean(1)
    on_patches = attention[:, measured.prefix :]
    return on_patches.reshape(len(on_patches), *measured.row.keys)


def _layer_rows(measured: GivenAttention) -> Iterator[GivenLayerRow]:
    """Yield the row of each layer, from the mean weights of its heads."""
    side = measured.row.keys[0]
    prefix = measured.prefix
    distances = _patch_distances(side)
    for means, sinks in zip(measured.means, sink_rows(measured.row, measured.arrays)):
        between_patches = means[prefix:, prefix:]  # means (queries, keys) of one layer
        received = between_patches.mean(0).reshape(1, side, side)  # one map
        total = max(float(between_patches.sum()), _SMALLEST)
        on_prefix = None
        if prefix:
            on_prefix = float(means[prefix:, :prefix].sum(-1).mean())
        yield GivenLayerRow(
            layer=sinks.layer,
            information=float(map_bits(torch.from_numpy(received))[0]),
            distance=float((between_patches * distances).sum() / total),
            sinks=sinks.mass,
            on_prefix=on_prefix,
        )


def _patch_distances(side: int) -> NDArray[np.floating[Any]]:
    """Return the distances (patches, patches) between all patches of a square grid, in patches."""
    rows, columns = np.divmod(np.arange(side * side), side)
    distances: NDArray[np.floating[Any]] = np.hypot(
        rows[:, None] - rows, columns[:, None] - columns
    )
    return distances

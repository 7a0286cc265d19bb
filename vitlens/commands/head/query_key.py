"""Queries and keys of one head: the score of a pair by dimension, and the map of both."""

import math
from typing import Any, Final

import torch

from vitlens.analysis.heads.query_key import TOP, Neurons, QueryKeyMap, neurons, query_key_map
from vitlens.analysis.naming.labels import HeadName
from vitlens.commands.head.options import HeadOptions
from vitlens.commands.head.record import (
    DimensionRow,
    PairArrays,
    PairRow,
    SpaceArrays,
    SpaceRow,
)
from vitlens.commands.run.progress import phase
from vitlens.commands.run.run import Run
from vitlens.data.split import Split
from vitlens.errors import UnsupportedError
from vitlens.lens.trace import layers
from vitlens.models.model import Model
from vitlens.uncertainty import share_of

_IMAGES: Final = 4  # images of which queries and keys are mapped
_HEAD_POINTS: Final = 500  # points of the head's map
_ALL_POINTS: Final = 1000  # points of the map of all heads
_FEWEST_POINTS: Final = 16  # queries, and keys, of each head in that map, if there are many heads


@phase("The score of a pair by dimension")
def measure_pair(run: Run[HeadOptions], head: HeadName, split: Split) -> dict[str, Any]:
    """Return the pair of --query and --key on the first image of a split, as record fields.

    Returns nothing for a layer without queries and keys of the whole image. Raises UnsupportedError
    for such a layer if --query or --key was given.
    """
    (batch,) = split.batches(1, device=run.model.device)
    options = run.options
    try:
        pair = neurons(
            run.model,
            batch.images,
            layer=head.layer,
            head=head.head,
            query=options.query,
            key=options.key,
            seed=run.run_options.seed,
        )
    except UnsupportedError:
        if options.query is not None or options.key is not None:
            raise
        return {}
    pixels = (batch.images.float().cpu() * 255).round().byte().numpy()
    return {
        "pair": (_pair_row(run, pair, split.names[0]),),
        "dimensions": tuple(_dimension_row(pair, index) for index in pair.order.tolist()),
        "pair_image": PairArrays(pixels),
    }


def _pair_row(run: Run[HeadOptions], pair: Neurons, image: str) -> PairRow:
    control: float | None = pair.control
    if math.isnan(pair.control):  # the head has too few dimensions
        control = None
    return PairRow(
        model=run.model.alias,
        layer=pair.layer,
        head=pair.head,
        image=image,
        query=_token_words(run.model, pair.query_patch, pair.query),
        key=_token_words(run.model, pair.key_patch, pair.key),
        query_patch=pair.query_patch,
        key_patch=pair.key_patch,
        grid=run.model.layout.grid,
        score=pair.score,
        bias=pair.bias,
        weight=pair.weight,
        dropped=TOP,
        without=pair.without,
        control=control,
    )


def _token_words(model: Model, patch: tuple[int, int] | None, position: int) -> str:
    """Return a token in words.

    patch: the row and column of a patch, None for a token before the patches.
    position: the index of the token.
    """
    if patch is not None:
        row, column = patch
        return f"the patch in row {row}, column {column}"
    prefix = model.layout.prefix
    return "CLS" if prefix[position : position + 1] == ("cls",) else f"token {position}"


def _dimension_row(pair: Neurons, index: int) -> DimensionRow:
    return DimensionRow(
        dimension=index,
        query=float(pair.query_values[index]),
        key=float(pair.key_values[index]),
        product=float(pair.products[index]),
    )


@phase("Queries and keys in one map")
def measure_space(run: Run[HeadOptions], head: HeadName) -> dict[str, Any]:
    """Return the map of the head's queries and keys, and that of all heads, as record fields.

    Returns nothing for a layer without queries and keys of the whole image.
    """
    model = run.model
    split = run.split.pick(torch.arange(min(_IMAGES, len(run.split))))
    (batch,) = split.batches(len(split), device=model.device)
    seed = run.run_options.seed
    try:
        head_map = query_key_map(
            model, batch.images, heads=[(head.layer, head.head)], points=_HEAD_POINTS, seed=seed
        )
        heads = sum(layer.heads for layer in layers(model))
        all_points = max(_ALL_POINTS, 2 * _FEWEST_POINTS * heads)
        all_map = query_key_map(model, batch.images, points=all_points, seed=seed)
    except UnsupportedError:
        return {}
    is_this_head = (all_map.layer == head.layer) & (all_map.head == head.head)
    return {
        "space": (_space_row(model.alias, head, head_map),),
        "space_maps": SpaceArrays(
            own=head_map.points.float().numpy(),
            own_is_key=head_map.is_key.numpy(),
            every=all_map.points.float().numpy(),
            every_is_key=all_map.is_key.numpy(),
            every_layer=all_map.layer.numpy(),
            every_is_own=is_this_head.numpy(),
        ),
    }


def _space_row(alias: str, head: HeadName, head_map: QueryKeyMap) -> SpaceRow:
    (alignment,) = head_map.alignments  # one for each head of the map
    return SpaceRow(
        model=alias,
        layer=head.layer,
        head=head.head,
        tokens=int(head_map.is_key.sum()),
        before=alignment.before,
        after=alignment.after,
        near=share_of(head_map.near.numpy()) if len(head_map.near) else None,
        trustworthiness=head_map.trustworthiness,
    )

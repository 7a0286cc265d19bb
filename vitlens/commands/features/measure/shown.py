"""What is drawn of single images: colours of patches, matching patches, nearest images, attention by head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.attention.weights import attention, attention_maps
from vitlens.analysis.features.correspondence import correspond
from vitlens.analysis.features.features import Features, patch_tokens
from vitlens.analysis.features.neighbours import Neighbours, nearest
from vitlens.analysis.features.patch_colours import patch_components
from vitlens.commands.features.arrays import (
    COLOUR_ARRAYS,
    HEAD_ARRAYS,
    MATCH_ARRAYS,
    RETRIEVAL_ARRAYS,
    SHOWN_ARRAYS,
    LastLayerHeadsArrays,
    MatchArrays,
    PatchColourArrays,
    RetrievalArrays,
    ShownArrays,
)
from vitlens.commands.features.measure.images import SHOWN, names_of, pixels, sample
from vitlens.commands.features.record import HEADS, MATCHES, PATCHES, RETRIEVAL
from vitlens.commands.features.record.patch_rows import MatchesRow, PatchColoursRow
from vitlens.commands.features.record.rows import LastLayerHeadsRow, RetrievalRow
from vitlens.commands.run.folder import RunFolder
from vitlens.data.split import Split
from vitlens.errors import UnsupportedError
from vitlens.lens.stages import stages
from vitlens.models.model import Model

NEIGHBOURS = 7  # shown for each query
_PAIRS = 2  # pairs of images whose patches are matched
_HEAD_IMAGES = 3  # on which the attention of heads is shown
_SIDE = 128  # pixels, at most, of a retrieved image


@dataclass(frozen=True)
class ShownImages:
    """The images of one model's figures, and those among which neighbours are searched.

    bank: None where the images themselves are searched; query: images whose neighbours are drawn in place of theirs;
    requested: whether the images are those of --show, in that order.
    """

    images: Split
    features: Features
    bank: Split | None
    bank_features: Features | None
    query: Split | None
    query_features: Features | None
    requested: bool = False

    @property
    def among(self) -> tuple[Literal["bank", "test", "shown"], Split, Features]:
        """The images among which neighbours are searched, their name and features."""
        if self.bank is None or self.bank_features is None:
            return "shown" if self.requested else "test", self.images, self.features
        return "bank", self.bank, self.bank_features


@dataclass(frozen=True)
class _Rows:
    """The rows of all models."""

    patches: list[PatchColoursRow]
    matches: list[MatchesRow]
    retrieval: list[RetrievalRow]
    heads: list[LastLayerHeadsRow]


def write_shown(folder: RunFolder, models: Sequence[Model], shown: Sequence[ShownImages], *, seed: int) -> None:
    """Write what is only drawn, for the same few images of all models: the first of --show, or a seeded sample."""
    images = shown[0].images
    first = torch.arange(min(SHOWN, len(images)))
    chosen = first if shown[0].requested else sample(len(images), SHOWN, labels=images.labels, seed=seed)
    folder.save(SHOWN_ARRAYS, ShownArrays(pixels(images, chosen).numpy()))
    rows = _Rows([], [], [], [])
    for model, own in zip(models, shown):
        neighbours = _write_retrieval(folder, model, own, chosen, rows)
        batch = _batch(own.images, chosen, model)
        if stages(model)[-1].grid is None:
            continue
        tokens = patch_tokens(model, batch)
        if tokens.shape[1] * tokens.shape[2] >= 4 and tokens.shape[3] >= 3:
            _write_colours(folder, model, tokens, rows)
            if neighbours is not None:
                _write_matches(folder, model, own, neighbours, chosen, tokens, rows)
        _write_heads(folder, model, batch[:_HEAD_IMAGES], pixels(own.images, chosen[:_HEAD_IMAGES]), rows)
    folder.write(PATCHES, rows.patches)
    folder.write(MATCHES, rows.matches)
    folder.write(RETRIEVAL, rows.retrieval)
    folder.write(HEADS, rows.heads)


def _batch(split: Split, indices: Tensor, model: Model) -> Tensor:
    (batch,) = split.pick(indices).batches(max(1, len(indices)), device=model.device)
    return batch.images


def _write_colours(folder: RunFolder, model: Model, tokens: Tensor, rows: _Rows) -> None:
    """Write the first three principal components of the patches as colours."""
    components = patch_components(tokens)
    colours = components.colours().numpy().astype(np.float32)
    folder.save(COLOUR_ARRAYS, PatchColourArrays(colours), model=model.alias)
    explained = tuple(float(share) for share in components.explained)
    rows.patches.append(PatchColoursRow(model.alias, _grid(tokens), explained))


def _grid(tokens: Tensor) -> tuple[int, int]:
    return tokens.shape[1], tokens.shape[2]


def _write_retrieval(
    folder: RunFolder, model: Model, own: ShownImages, chosen: Tensor, rows: _Rows
) -> Neighbours | None:
    """Write the neighbours of the queries, or else of the chosen images; returns those of the chosen images."""
    where, among, features = own.among
    same = among is own.images
    count = min(NEIGHBOURS, len(features) - (1 if same else 0))
    if count < 1:
        return None
    of_chosen = nearest(own.features.at(-1)[chosen], features.at(-1), k=count, leave_out=chosen if same else None)
    queries, near, places = own.images, of_chosen, chosen
    if own.query_features is not None and own.query is not None:
        near = nearest(own.query_features.at(-1), features.at(-1), k=min(NEIGHBOURS, len(features)))
        queries, places = own.query, torch.arange(len(own.query))
    indices = near.indices.long()
    of_class = _same_class(among, queries, indices, places) if own.query is None else None
    arrays = RetrievalArrays(
        queries=pixels(queries, places, most=_SIDE).numpy(),
        query_names=np.array(names_of(queries, places)),
        neighbours=torch.stack([pixels(among, row, most=_SIDE) for row in indices]).numpy(),
        names=np.array([names_of(among, row) for row in indices]),
        similarity=near.similarity.double().numpy(),
        same=None if of_class is None else of_class.numpy(),
    )
    folder.save(RETRIEVAL_ARRAYS, arrays, model=model.alias)
    rows.retrieval.append(RetrievalRow(model.alias, where, len(features), *indices.shape))
    return of_chosen


def _same_class(among: Split, queries: Split, indices: Tensor, places: Tensor) -> Tensor | None:
    """Whether each neighbour (queries, k) is of its query's class; None where either has no labels."""
    if among.labels is None or queries.labels is None:
        return None
    return among.labels.cpu()[indices] == queries.labels.cpu()[places][:, None]


def _write_matches(
    folder: RunFolder,
    model: Model,
    own: ShownImages,
    neighbours: Neighbours,
    chosen: Tensor,
    tokens: Tensor,
    rows: _Rows,
) -> None:
    """Write the patches of an image and of its nearest neighbour that are each other's best match."""
    _, among, _ = own.among
    ours, theirs = chosen[:_PAIRS], neighbours.indices[:_PAIRS, 0].long()
    other_tokens = patch_tokens(model, _batch(among, theirs, model))
    pairs = [correspond(mine, other) for mine, other in zip(tokens, other_tokens)]
    arrays = MatchArrays(
        first=pixels(own.images, ours).numpy(),
        second=pixels(among, theirs).numpy(),
        sources={number: pair.sources.numpy() for number, pair in enumerate(pairs)},
        targets={number: pair.targets.numpy() for number, pair in enumerate(pairs)},
        similarity={number: pair.similarity.double().numpy() for number, pair in enumerate(pairs)},
    )
    folder.save(MATCH_ARRAYS, arrays, model=model.alias)
    for first, second, pair in zip(names_of(own.images, ours), names_of(among, theirs), pairs):
        rows.matches.append(MatchesRow(model.alias, first, second, _grid(tokens), len(pair.similarity)))


def _write_heads(folder: RunFolder, model: Model, images: Tensor, drawn: Tensor, rows: _Rows) -> None:
    """Write the last layer's attention of the CLS token (without one, of the token that the classifier reads), by
    head."""
    if model.anatomy.family != "vit":
        return
    try:
        maps, reading, layer = last_heads(model, images)
    except UnsupportedError:  # attention that the lens cannot observe, or none to patches
        return
    folder.save(HEAD_ARRAYS, LastLayerHeadsArrays(drawn.numpy(), maps.float().cpu().numpy()), model=model.alias)
    rows.heads.append(LastLayerHeadsRow(model.alias, reading, layer, maps.shape[1]))


def last_heads(model: Model, images: Tensor) -> tuple[Tensor, str, int]:
    """Maps (batch, heads, rows, columns), the query that they belong to, and their layer; raises UnsupportedError."""
    layout = model.anatomy.layout
    if layout is not None and layout.positions("cls") and model.anatomy.readout == "mean":
        # a CLS token that no classifier reads, as DINOv3's in timm
        layers = attention(model, images, rows="cls")
        if layers[-1].shape[-1] == layout.tokens:
            return layout.as_map(layers[-1][:, :, 0]), "the CLS token", len(layers) - 1
    last = attention_maps(model, images)[-1]
    return last.maps, last.reading, last.site.layer

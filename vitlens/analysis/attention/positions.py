"""Similarity of a model's position embeddings, and its correlation with the distance of patches."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.evaluation.intervals import spearman
from vitlens.analysis.heads.geometry import of_layout
from vitlens.models.model import Model
from vitlens.models.positions import FIXED
from vitlens.models.vit import VisionTransformer
from vitlens.shapes import TokenLayout

Similarity = Float[Tensor, "patches patches"]
_LEAST_VARIATION = 1e-9  # numbers with a smaller standard deviation are constant


def position_similarity(model: Model) -> Similarity | None:
    """Return the cosine similarity of the position embeddings of all pairs of patches.

    They are learned or fixed. The result is None for a model without them.
    """
    embedding = getattr(model.module, "pos_embed", None)
    if isinstance(model.module, VisionTransformer) and model.module.config.positions in FIXED:
        # computed again, because the images may have another size than in training
        embedding = model.module.positions(model.layout.grid)
    if embedding is None:
        encoder = getattr(model.module, "encoder", None)
        embedding = getattr(encoder, "pos_embedding", None)
    if not isinstance(embedding, Tensor) or model.anatomy.layout is None:
        return None
    tokens = embedding.detach().flatten(0, -2)  # (tokens, dim), whatever axes come first
    patches = model.layout.patches
    # the embeddings must be those of this grid; prefix tokens may have embeddings or not
    if not patches <= len(tokens) <= model.layout.tokens:
        return None
    directions = torch.nn.functional.normalize(tokens[-patches:], dim=-1)
    return directions @ directions.T


def distance_correlation(similarity: Similarity, layout: TokenLayout) -> float | None:
    """Return Pearson's correlation of the similarity of position embeddings with distance.

    The distance is that of the patches in px. The correlation is over all pairs of patches. It is
    negative if near positions are more similar than far ones, and 0 without such structure. It is
    None if either is constant.
    """
    distances = of_layout(layout).distances()[0]  # of the only window
    is_pair = torch.ones_like(distances, dtype=torch.bool).triu(1)  # each pair once
    similarities = similarity.detach().double().cpu()[is_pair]
    both = torch.stack((similarities, distances[is_pair]))  # one column for each pair
    if both.shape[1] < 2 or bool((both.std(1) < _LEAST_VARIATION).any()):
        return None
    return float(torch.corrcoef(both)[0, 1])


class RankCorrelations(NamedTuple):
    """Rank correlations of similarity and proximity.

    all: over all pairs of patches.
    rows: over pairs in the same row.
    columns: over pairs in the same column.
    """

    all: float | None
    rows: float | None
    columns: float | None


def rank_correlation(similarity: Similarity, layout: TokenLayout) -> RankCorrelations:
    """Return Spearman's correlation of similarity with minus the distance of the patches in px.

    It is 1 if nearer patches are always more similar, and 0 without such order. The pairs of all
    rows are ranked together, and ties have their mean rank. The result is None for fewer than two
    pairs, and if all pairs are equally far apart or equally similar.
    """
    patches = torch.arange(layout.patches)
    row = patches // layout.grid[1]
    column = patches % layout.grid[1]
    is_pair = torch.ones(layout.patches, layout.patches, dtype=torch.bool).triu(1)
    proximity = -of_layout(layout).distances()[0]  # of the only window
    # rounded, because the similarities of equal offsets differ in the last bits
    rounded = similarity.detach().double().cpu().round(decimals=6)

    def correlate(pairs: Tensor) -> float | None:
        correlation = spearman(rounded[pairs][None], proximity[pairs][None]).item()
        return None if math.isnan(correlation) else correlation

    return RankCorrelations(
        all=correlate(is_pair),
        rows=correlate(is_pair & (row[:, None] == row)),
        columns=correlate(is_pair & (column[:, None] == column)),
    )

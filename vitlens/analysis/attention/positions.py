"""How similar a model's position embeddings are, and how well their similarity follows the distance
of the patches.
"""

import math

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


def position_similarity(model: Model) -> Similarity | None:
    """Cosine similarity of the position embeddings, learned or fixed, of all pairs of patches; None
    without them.
    """
    embedding = getattr(model.module, "pos_embed", None)
    if isinstance(model.module, VisionTransformer) and model.module.config.positions in FIXED:
        embedding = model.module.positions(
            model.layout.grid
        )  # computed again where the images have another size
    if embedding is None:
        embedding = getattr(getattr(model.module, "encoder", None), "pos_embedding", None)
    if not isinstance(embedding, Tensor) or model.anatomy.layout is None:
        return None
    tokens = embedding.detach().flatten(0, -2)
    patches = model.layout.patches
    # embeddings of this grid; prefix tokens before the patches may have embeddings or not
    if not patches <= len(tokens) <= model.layout.tokens:
        return None
    unit = torch.nn.functional.normalize(tokens[-patches:], dim=-1)
    return unit @ unit.T


def distance_correlation(similarity: Similarity, layout: TokenLayout) -> float | None:
    """Pearson's correlation of the similarity of position embeddings with the distance in pixels,
    over all pairs.

    Negative where near positions are more similar than far ones; 0 without such structure. None
    where either is constant.
    """
    distances = of_layout(layout).distances()[0]
    above = torch.ones_like(distances, dtype=torch.bool).triu(1)
    pairs = torch.stack((similarity.detach().double().cpu()[above], distances[above]))
    if pairs.shape[1] < 2 or bool((pairs.std(1) < 1e-9).any()):
        return None
    return float(torch.corrcoef(pairs)[0, 1])


def rank_correlation(
    similarity: Similarity, layout: TokenLayout
) -> tuple[float | None, float | None, float | None]:
    """Spearman's correlation of the similarity of position embeddings with minus the Euclidean
    distance of the patches in pixels: of all pairs, of pairs in one row, of pairs in one column;
    the pairs of all rows are ranked together.

    1 where nearer patches are always more similar, 0 without such order; ties have their mean rank.
    None where there are fewer than two pairs, or all are equally far apart or similar.
    """
    numbers = torch.arange(layout.patches)
    row = numbers // layout.grid[1]
    column = numbers % layout.grid[1]
    above = torch.ones(layout.patches, layout.patches, dtype=torch.bool).triu(1)
    near = -of_layout(layout).distances()[0]
    alike = (
        similarity.detach().double().cpu().round(decimals=6)
    )  # as equal offsets differ in the last bits

    def of(pairs: Tensor) -> float | None:
        found = spearman(alike[pairs][None], near[pairs][None]).item()
        return None if math.isnan(found) else found

    return of(above), of(above & (row[:, None] == row)), of(above & (column[:, None] == column))

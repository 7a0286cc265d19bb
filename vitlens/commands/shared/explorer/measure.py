"""Measures what the attention explorer shows."""

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.attention.defaults import WHOLE
from vitlens.analysis.attention.tokens import require_token_attention, token_attention
from vitlens.commands.shared.explorer.record import LEVELS, ExplorerArrays, ExplorerRow
from vitlens.errors import LensError, UnsupportedError
from vitlens.layout import TokenLayout
from vitlens.lens.layers import probe_images
from vitlens.lens.observe import survey_weights
from vitlens.models.model import Model
from vitlens.report.explorer import pooled
from vitlens.report.html.packing import quantised
from vitlens.shapes import Images

_BYTES = 48 << 20  # of the weights by head, and of the means over heads, of one model


def explored(model: Model, images: Images, *, whole: int = WHOLE) -> tuple[ExplorerRow, ExplorerArrays | None]:
    """What looks where in these images, of the first `whole` by every head; or why this model has none."""
    try:
        require_token_attention(model)
    except (LensError, UnsupportedError) as error:
        return ExplorerRow(model.alias, str(error)), None
    several, each = _fitting(model, whole)
    return measured(model, images[:several], whole=each)


def measured(model: Model, images: Images, *, whole: int = WHOLE) -> tuple[ExplorerRow, ExplorerArrays]:
    """What looks where in these images. Raises UnsupportedError for a model of which there is no explorer."""
    layout, special = model.layout, len(model.layout.prefix)
    found = token_attention(model, images, whole=whole, pool=lambda weights: _pooled(weights, layout))
    heads, heads_most = quantised(found.heads.numpy(), special, LEVELS)
    means, means_most = quantised(found.means[len(found.heads) :].numpy(), special, LEVELS)
    row = ExplorerRow(
        model.alias, "", layout.grid, _queries(layout), layout.prefix, images=len(found.means), whole=len(found.heads)
    )
    return row, ExplorerArrays(heads, heads_most, means, means_most, found.rollout.half().numpy())


def _fitting(model: Model, whole: int) -> tuple[int, int]:
    """How many images are kept, and of how many of them every head, so that a folder stays small: _BYTES of each."""
    layout = model.layout
    rows, columns = _queries(layout)
    sites = [site for site in survey_weights(model, probe_images(model, 1)) if site.kind == "patch"]
    mean = len(sites) * (len(layout.prefix) + rows * columns) * layout.tokens
    each = max(1, min(whole, _BYTES // (mean * sites[0].heads)))
    return each + _BYTES // mean, each


def _pooled(weights: Tensor, layout: TokenLayout) -> Tensor:
    """Weights (..., queries, keys) with as few queries as a page shows."""
    fewer, _ = pooled(weights.numpy(), len(layout.prefix), layout.grid)
    return torch.from_numpy(np.ascontiguousarray(fewer))


def _queries(layout: TokenLayout) -> tuple[int, int]:
    """The grid of the queries that are kept."""
    return pooled(np.zeros((layout.tokens, 1)), len(layout.prefix), layout.grid)[1]

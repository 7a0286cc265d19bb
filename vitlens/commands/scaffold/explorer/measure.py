"""Measures what the attention explorer shows."""

import numpy as np

from vitlens.analysis.attention.defaults import WHOLE
from vitlens.analysis.attention.tokens import TokenAttention, require_token_attention, token_attention
from vitlens.commands.scaffold.explorer.record import EXPLORER, EXPLORER_ARRAYS, ExplorerArrays, ExplorerRow, packed
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.errors import LensError, UnsupportedError
from vitlens.models.model import Model
from vitlens.shapes import Images


def write_explorer(folder: RunFolder, model: Model, images: Images, *, whole: int = WHOLE) -> None:
    """Keep what looks where in these images, of the first `whole` by every head; or why this model has none."""
    folder.write(EXPLORER, [explorer_row(folder, model, images, whole=whole)])


def explorer_row(folder: RunFolder, model: Model, images: Images, *, whole: int = WHOLE) -> ExplorerRow:
    """The same, without the row, which says what was kept."""
    try:
        require_token_attention(model)
    except (LensError, UnsupportedError) as error:
        return ExplorerRow(model.alias, str(error))
    found = token_attention(model, images, whole=whole)
    folder.save(EXPLORER_ARRAYS, explorer_arrays(found), model=model.alias)
    return ExplorerRow(
        model.alias, "", found.keys, found.queries, found.special, images=len(found.means), whole=len(found.heads)
    )


def explorer_arrays(found: TokenAttention) -> ExplorerArrays:
    """Weights as they are kept: the means of those images alone of which not every head is."""
    heads, heads_most = packed(found.heads.float().numpy())
    means, means_most = packed(found.means[len(found.heads) :].float().numpy())
    return ExplorerArrays(heads, heads_most, means, means_most, np.asarray(found.rollout.half()))

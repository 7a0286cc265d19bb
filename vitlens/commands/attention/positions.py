"""The layout of the patches, and how similar their position embeddings are."""

from vitlens.analysis.attention.positions import distance_correlation, position_similarity, rank_correlation
from vitlens.commands.attention.record import DISTANCE_CORRELATION, LAYOUT, POSITIONS, LayoutRow, PositionArrays
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.position_order import RANK_CORRELATION
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate


def write_positions(folder: RunFolder, model: Model, split: Split) -> None:
    """Write the layout of the patches and the similarity of the position embeddings."""
    layout = model.anatomy.layout
    height, width = split.size
    rows = [] if layout is None else [LayoutRow(layout.grid, layout.prefix, layout.patch_size, (height, width))]
    folder.write(LAYOUT, rows)
    similarity = position_similarity(model)
    if similarity is None:
        return
    folder.save(POSITIONS, PositionArrays(similarity.float().cpu().numpy()))
    found = {DISTANCE_CORRELATION(model=model.alias): distance_correlation(similarity, model.layout)}
    for pairs, value in rank_correlation(similarity, model.layout)._asdict().items():
        found[RANK_CORRELATION(model=model.alias, pairs=pairs)] = value
    for name, value in found.items():
        if value is not None:  # no interval: pairs of positions are not independent
            folder.metric(name, Estimate(value, n=model.layout.patches, unit=""))

"""How well the position embeddings of a study's points follow the places of the patches, after every training."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.attention.positions import position_similarity, rank_correlation
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.shared.position_order import PAIRS, RANK_CORRELATION
from vitlens.commands.study.kinds import Kind, Point
from vitlens.commands.study.measure.trial import StudySetup
from vitlens.commands.study.record import POINTS_FOLDER, POSITION_MAPS, POSITION_ORDER, PositionRow, SimilarityArrays
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate, student_mean


def write_point_positions(folder: RunFolder, kind: Kind, setup: StudySetup, *, seeds: int) -> None:
    """Write the similarity of position embeddings of every point, of a kind that asks for it."""
    if not kind.positions:
        return
    rows: list[PositionRow] = []
    similarities: dict[int, NDArray[np.floating]] = {}
    for index, point in enumerate(kind.points):
        for seed in range(setup.options.seed, setup.options.seed + seeds):
            trained = load(str(folder.path / POINTS_FOLDER / point.label / f"seed-{seed}"))
            similarity = position_similarity(trained)
            if similarity is None:
                continue
            rows.append(_row(point, seed, trained, setup.model(point, seed=seed)))
            similarities.setdefault(index, similarity.float().numpy())
    folder.write(POSITION_ORDER, rows)
    if rows:
        folder.save(POSITION_MAPS, SimilarityArrays(similarities))
    for point in kind.points:
        for pairs in PAIRS:
            values = [value for row in rows if row.label == point.label and (value := getattr(row, pairs)) is not None]
            if values:
                folder.metric(RANK_CORRELATION(model=point.label, pairs=pairs), _over_seeds(values))


def _row(point: Point, seed: int, trained: Model, untrained: Model) -> PositionRow:
    orders = []
    for model in (trained, untrained):
        similarity = position_similarity(model)
        assert similarity is not None  # both are of one architecture
        orders.append(rank_correlation(similarity, model.layout))
    after, before = orders
    return PositionRow(point.label, point.words, seed, after.all, after.rows, after.columns, before.all)


def _over_seeds(values: list[float]) -> Estimate:
    """The mean over seeds with Student's interval; fixed embeddings are those of every seed and have none."""
    if len(set(values)) == 1:
        return Estimate(values[0], unit="")
    mean = student_mean(values, unit="")
    assert mean.low is not None  # of at least two
    assert mean.high is not None
    return replace(mean, low=max(mean.low, -1.0), high=min(mean.high, 1.0))

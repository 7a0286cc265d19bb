"""How similar layers are: every layer against every other, within a model and between two."""

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.features.cka import FEWEST
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.similarity import Similarity, distance_correlation, similarity
from vitlens.commands.features.arrays import LAYER_SIMILARITY, SimilarityArrays
from vitlens.commands.features.record import CKA, SIMILARITY, SimilarityRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.uncertainty import Estimate

Matrix = NDArray[np.float64]


def write_similarity(folder: RunFolder, tests: Sequence[Features], *, seed: int) -> None:
    """Linear CKA and the rank correlation of distances between all layers, on the test images.

    Between two models each CKA is a metric, too. Of fewer than four images nothing is compared: neither is defined.
    """
    rows: list[SimilarityRow] = []
    cka: dict[int, Matrix] = {}
    rank: dict[int, Matrix] = {}
    pairs = combinations_with_replacement(range(len(tests)), 2) if len(tests[0]) >= FEWEST else ()
    for number, (one, two) in enumerate(pairs):
        first, second = tests[one], None if one == two else tests[two]
        compared = similarity(first, second, seed=seed)
        cka[number] = compared.values.numpy()
        rank[number] = distance_correlation(first, second, seed=seed).values.numpy()
        rows.append(_row(first, tests[two], compared, cka[number], rank[number]))
        if second is not None:
            for name, estimate in _metrics(first.alias, second.alias, compared).items():
                folder.metric(name, estimate)
    folder.write(SIMILARITY, rows)
    folder.save(LAYER_SIMILARITY, SimilarityArrays(cka, rank))


def _metrics(first: str, second: str, compared: Similarity) -> dict[str, Estimate]:
    metrics = {}
    for (layer, other), value in np.ndenumerate(compared.values.numpy()):
        if np.isfinite(value):
            low, high = (None if end is None else float(end[layer, other]) for end in (compared.low, compared.high))
            name = CKA(first=first, second=second, layer=layer, other=other)
            metrics[name] = Estimate(float(value), low, high, compared.n, "")
    return metrics


def _row(first: Features, second: Features, compared: Similarity, cka: Matrix, rank: Matrix) -> SimilarityRow:
    """First with last layer, last with last, the mean, the most similar pair; within a model, of different layers."""
    finite = np.where(np.isfinite(cka), cka, -np.inf)
    if first is second:
        np.fill_diagonal(finite, -np.inf)
    some = np.isfinite(finite).any()  # else a model of one layer, which has no two to compare
    layer, other = np.unravel_index(int(finite.argmax()), finite.shape)
    low, high = compared.low, compared.high
    return SimilarityRow(
        first=first.alias,
        second=second.alias,
        images=len(first),
        first_last=_number(cka[0, -1]),
        first_last_low=None if low is None else _number(low[0, -1]),
        first_last_high=None if high is None else _number(high[0, -1]),
        last_last=_number(cka[-1, -1]),
        last_last_low=None if low is None else _number(low[-1, -1]),
        last_last_high=None if high is None else _number(high[-1, -1]),
        rank_first_last=_number(rank[0, -1]),
        rank_last_last=_number(rank[-1, -1]),
        mean=_number(cka[np.isfinite(finite)].mean()) if some else None,
        most=_number(finite[layer, other]) if some else None,
        most_layers=(int(layer), int(other)) if some else None,
    )


def _number(value: Any) -> float | None:
    """For JSON: None for NaN."""
    number = float(value)
    return number if np.isfinite(number) else None

"""What `vitlens features` writes of similarity: every layer against every other, within a model and between two."""

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.features.cka import FEWEST
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.similarity import Similarity, distance_correlation, similarity
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.uncertainty import Estimate

Matrix = NDArray[np.float64]


def keep_similarity(folder: RunFolder, tests: Sequence[Features], *, seed: int) -> None:
    """Linear CKA and the rank correlation of distances between all layers, on the test images.

    Arrays cka_I_J and rank_I_J hold the layers of model I (down) and J (across), NaN for features that do not vary;
    between two models each number is a metric, too. Of fewer than four images nothing is written: neither is defined.
    """
    if len(tests[0]) < FEWEST:
        folder.table("similarity", [])
        return
    arrays: dict[str, Matrix] = {}
    rows: list[dict[str, object]] = []
    for one, two in combinations_with_replacement(range(len(tests)), 2):
        first, second = tests[one], None if one == two else tests[two]
        found = similarity(first, second, seed=seed)
        values, ranks = found.values.numpy(), distance_correlation(first, second, seed=seed).values.numpy()
        arrays[f"cka_{one}_{two}"], arrays[f"rank_{one}_{two}"] = values, ranks
        names = {"first": first.alias, "second": tests[two].alias, "images": len(first)}
        rows.append({**names, **_summary(values, ranks, own=one == two), **_ends(found)})
        if second is not None:
            _metrics(folder, f"cka/{first.alias}/{second.alias}", found)
    folder.arrays("similarity", **arrays)
    folder.table("similarity", rows)


def _metrics(folder: RunFolder, start: str, found: Similarity) -> None:
    for (down, across), value in np.ndenumerate(found.values.numpy()):
        if not np.isfinite(value):
            continue
        low, high = (None if end is None else float(end[down, across]) for end in (found.low, found.high))
        folder.metric(f"{start}/{down}/{across}", Estimate(float(value), low, high, found.n, ""))


def _summary(values: Matrix, ranks: Matrix, *, own: bool) -> dict[str, object]:
    """First with last layer, last with last, the mean, the most alike pair; within a model, of unlike layers."""
    seen = np.where(np.isfinite(values), values, -np.inf)
    if own:
        np.fill_diagonal(seen, -np.inf)
    found: dict[str, object] = {
        "first_last": _number(values[0, -1]),
        "last_last": _number(values[-1, -1]),
        "rank_first_last": _number(ranks[0, -1]),
        "rank_last_last": _number(ranks[-1, -1]),
    }
    if not np.isfinite(seen).any():  # a model of one layer has no two to compare
        return found
    down, across = np.unravel_index(int(seen.argmax()), seen.shape)
    inside = values[np.isfinite(seen)]
    more = {
        "mean": _number(inside.mean()),
        "most": _number(seen[down, across]),
        "most_layers": [int(down), int(across)],
    }
    return {**found, **more}


def _ends(found: Similarity) -> dict[str, float | None]:
    """The intervals of the last layers' similarity, and of that of the first and the last."""
    if found.low is None or found.high is None:
        return {}
    low, high = found.low.numpy(), found.high.numpy()
    return {
        "first_last_low": _number(low[0, -1]),
        "first_last_high": _number(high[0, -1]),
        "last_last_low": _number(low[-1, -1]),
        "last_last_high": _number(high[-1, -1]),
    }


def _number(value: Any) -> float | None:
    """For JSON: nothing for NaN."""
    found = float(value)
    return found if np.isfinite(found) else None

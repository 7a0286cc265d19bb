"""Checks of a method built by hand."""

from collections.abc import Collection, Mapping

from vitlens.analysis.faithfulness.checks import Judgement, Stage, judged_cascade, judged_stability
from vitlens.commands.shared.maps.record import (
    CENTRE,
    IMPUTED,
    RANDOM,
    SHIFTS,
    SHUFFLED,
    WEIGHTS,
    MapCheckRow,
    map_check,
    removal_check,
)
from vitlens.uncertainty import Estimate

__all__ = [
    "CENTRE",
    "FALLING",
    "IMPUTED",
    "RANDOM",
    "SHIFTS",
    "SHUFFLED",
    "STAYING",
    "WEIGHTS",
    "checks",
]

STAGES = ("head", "blocks 4 to 5", "blocks 2 to 3", "block 1", "block 0", "embedding")
FALLING = (0.7, 0.3, 0.1, 0.0, 0.0, 0.0)
STAYING = (1.0, 0.99, 0.92, 0.78, 0.24, 0.0)  # rollout of a DeiT
HALF = 0.05  # of the width of every interval


def estimate(value: float, n: int) -> Estimate:
    return Estimate(value, value - HALF, value + HALF, n, "")


def checks(
    model: str = "vit",
    method: str = "relevance",
    *,
    score: float = 0.3,
    over: Mapping[str, float] | None = None,
    second: Mapping[str, float] | None = {},
    without: Collection[str] = (),
    cascade: tuple[float, ...] | None = FALLING,
    kept_share: float | None = 0.1,
    n: int = 100,
    randomised: int = 32,
    usable: int = 100,
    jumped: float | None = 0.0,
    behind: float | None = None,
    one_map: bool = False,
    fixed: bool = False,
) -> list[MapCheckRow]:
    """Return a method that passes every check, except for what is changed.

    over: by how much its score exceeds each baseline; second: the same with the second replacement
    (None: not tried); without: baselines that were not compared; one_map: the same for all images;
    fixed: of a file, so that nothing can make the maps again.
    """
    margins = {RANDOM: 0.3, CENTRE: 0.2, SHUFFLED: 0.1} | dict(over or {})
    rows = []
    for substrate, changed in ((IMPUTED, {}), ("mean", second)):
        if changed is not None:
            estimates = {
                name: estimate(value, n)
                for name, value in {**margins, **changed}.items()
                if name not in without
            }
            less = None if behind is None else estimate(behind, n)
            rows.append(
                removal_check(
                    model,
                    method,
                    substrate,
                    estimate(score, n),
                    estimates,
                    usable=usable,
                    one_map=one_map,
                    behind=less,
                )
            )
    if fixed:
        impossible = Judgement("inconclusive", lack="fixed maps")
        return [*rows, *(map_check(model, method, name, impossible) for name in (WEIGHTS, SHIFTS))]
    stages = [
        Stage(name, estimate(mean, randomised), kept_share)
        for name, mean in zip(STAGES, cascade or ())
    ]
    unranked = Judgement("inconclusive", lack="not finite")
    rows.append(map_check(model, method, WEIGHTS, judged_cascade(stages) if cascade else unranked))
    if jumped is not None:
        share = Estimate(jumped, max(0.0, jumped - 0.1), jumped + 0.1, 16)
        rows.append(map_check(model, method, SHIFTS, judged_stability(estimate(0.9, 16), share)))
    return rows

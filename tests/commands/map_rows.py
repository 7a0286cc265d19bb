"""Rows of map checks built by hand."""

from vitlens.analysis.faithfulness.cascade import RandomisedStage, judged_cascade
from vitlens.commands.shared.maps.rows import INSERTION, ROAD, MapCheck, Margin

STAGES = ("head", "blocks 4 to 5", "blocks 2 to 3", "block 1", "block 0", "embedding")
FALLING = (0.7, 0.3, 0.1, 0.0, 0.0, 0.0)
STAYING = (1.0, 0.99, 0.92, 0.78, 0.24, 0.0)  # rollout of a DeiT


def map_check(
    model: str = "vit",
    method: str = "relevance",
    *,
    over_random: float = 0.3,
    over_centre: float = 0.1,
    half: float = 0.05,
    cascade: tuple[float, ...] | None = FALLING,
    kept: float | None = 0.1,
    n: int = 100,
    randomised: int = 32,
    unusable: int = 0,
    leader: tuple[str, float] | None = None,
    road: float | None = None,
    gap: float | None = None,
) -> MapCheck:
    """A method that passes every check, but for what is changed. half: half of the width of every interval; road:
    what judges, where it was run."""
    others = [("random", over_random), ("centre", over_centre), *([leader] if leader else [])]
    stages = [RandomisedStage(name, mean, mean - half, mean + half, kept) for name, mean in zip(STAGES, cascade or ())]
    return MapCheck(
        model=model,
        method=method,
        images=n,
        unusable=unusable,
        gap=over_random if gap is None else gap,
        low=over_random - half,
        high=over_random + half,
        road=road,
        margins=tuple(Margin(name, value, value - half, value + half, n) for name, value in others),
        cascade=None if cascade is None else judged_cascade(stages, randomised),
        judged_by=INSERTION if road is None else ROAD,
    )

"""`vitlens train` as a function of what tests vary."""

from collections.abc import Mapping
from pathlib import Path

from vitlens.commands.run.options import RunOptions
from vitlens.commands.train.measure import measure
from vitlens.commands.train.options import RecipeChanges, Shape, TrainOptions


def train(
    model: str | None,
    *,
    recipe: Mapping[str, object] | None = None,
    shape: Mapping[str, object] | None = None,
    image_size: tuple[int, int] | None = None,
    options: RunOptions,
    **more: object,
) -> Path | None:
    """recipe, shape: numbers by field; more: other fields of TrainOptions."""
    changes, sides = RecipeChanges(other=recipe or {}), Shape(image_size, other=shape or {})
    return measure(TrainOptions(model, recipe=changes, shape=sides, run=options, **more))  # type: ignore[arg-type]

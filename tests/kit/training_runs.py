"""`vitlens train` as a function of what tests vary."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from vitlens.commands.run.options import RunOptions
from vitlens.commands.train import measure as module
from vitlens.commands.train.measure import measure
from vitlens.commands.train.options import RecipeChanges, Shape, TrainOptions
from vitlens.training.metrics import Progress


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
    changes = RecipeChanges(settings=tuple(f"{name}={value}" for name, value in (recipe or {}).items()))
    sides = Shape(image_size, **(shape or {}))  # type: ignore[arg-type]
    return measure(TrainOptions(model or "", recipe=changes, shape=sides, run=options, **more))  # type: ignore[arg-type]


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trainings of all weights be interrupted at a step."""
    fit = module.fit

    def interrupted(*args: object, on_progress: Callable[[Progress], None], **options: object) -> object:
        def tell(progress: Progress) -> None:
            if progress.step >= step:
                raise KeyboardInterrupt
            on_progress(progress)

        return fit(*args, on_progress=tell, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "fit", interrupted)

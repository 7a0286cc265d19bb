"""`vitlens train` as a function of what tests vary, and trainings that are interrupted."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from vitlens.commands.run.options import RunOptions
from vitlens.commands.train import measure as module
from vitlens.commands.train.measure import measure
from vitlens.commands.train.options import RecipeChanges, Shape, TrainOptions
from vitlens.training.metrics import Progress
from vitlens.training.task import Task


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


@contextmanager
def interrupted(when: Callable[[int, Progress], bool], module: ModuleType = module) -> Iterator[None]:
    """Inside, a training of all weights is interrupted, by its number (from 1 on) and its progress."""
    train_on_images, begun = module.train_on_images, 0

    def stopping(task: Task) -> object:
        nonlocal begun
        begun += 1

        def tell(progress: Progress) -> None:
            if when(begun, progress):
                raise KeyboardInterrupt

        return train_on_images(replace(task, on_progress=tell))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "train_on_images", stopping)
        with pytest.raises(KeyboardInterrupt):
            yield

"""`vitlens train` as a function of what tests vary, and trainings that are interrupted."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

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


@contextmanager
def interrupted(when: Callable[[int, Progress], bool], module: ModuleType = module) -> Iterator[None]:
    """Inside, a training of all weights is interrupted, by its number (from 1 on) and its progress."""
    fit, begun = module.fit, 0

    def stopping(*args: object, on_progress: Callable[[Progress], None], **options: object) -> object:
        nonlocal begun
        begun += 1

        def tell(progress: Progress) -> None:
            if when(begun, progress):
                raise KeyboardInterrupt
            on_progress(progress)

        return fit(*args, on_progress=tell, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fit", stopping)
        with pytest.raises(KeyboardInterrupt):
            yield

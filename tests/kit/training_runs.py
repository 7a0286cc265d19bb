"""Trainings that are interrupted, and the folder of one that kept its weights."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from tests.kit.making import CLASSES, save, untrained
from vitlens.commands.study.kinds import trials as kinds
from vitlens.commands.train import measure as trainings
from vitlens.files import write_text
from vitlens.models.model import Model
from vitlens.training.checkpoint import keep_weights
from vitlens.training.metrics import METRICS_FILE, EpochMetrics, Progress
from vitlens.training.task import Task


@contextmanager
def interrupted(
    when: Callable[[int, Progress], bool], command: Literal["train", "study"] = "train"
) -> Iterator[None]:
    """Interrupt a training by its number (from 1 on) and its progress, inside the context."""
    module = kinds if command == "study" else trainings
    begun = 0

    def stopping(plain: Callable[..., object], task: Task, **how: object) -> object:
        nonlocal begun
        begun += 1

        def tell(progress: Progress) -> None:
            if when(begun, progress):
                raise KeyboardInterrupt

        return plain(replace(task, on_progress=tell), **how)

    with pytest.MonkeyPatch.context() as patch:
        # reports every step, however quick
        patch.setattr("vitlens.training.loop.PROGRESS_INTERVAL", 0.0)
        # a study's are not counted
        for name in (
            "train_on_images",
            *(() if command == "study" else ("fit_head",)),
        ):
            patch.setattr(module, name, partial(stopping, getattr(module, name)))
        yield


def kept_run(folder: Path, *, saved_after: Sequence[int], epochs: int) -> Path:
    """Return a run of so many epochs with stored random weights after some of them."""

    def made(seed: int) -> Model:
        shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
        return untrained("vit-mini", classes=CLASSES, seed=seed, overrides=shape)

    for epoch in saved_after:
        keep_weights(folder, made(epoch), epochs=epoch)
    save(made(epochs), folder / "model.safetensors")
    lines = [
        EpochMetrics(epoch, epoch + 1, 8, 1e-3, 1.0, 0.5, None, None, 1.0, 8.0)
        for epoch in range(epochs)
    ]
    older = [asdict(line) for line in lines]
    for line in older:
        del line["gradient_norm"]
    # as they once were
    write_text(folder / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in older))
    return folder

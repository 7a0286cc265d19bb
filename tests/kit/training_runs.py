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
    when: Callable[[int, Progress], bool],
    command: Literal["train", "study"] = "train",
    *,
    error: type[BaseException] = KeyboardInterrupt,
) -> Iterator[None]:
    """Interrupt a training by its number (from 1 on) and its progress, inside the context.

    Of a study, trainings of a head on cached features are not counted.
    error: with which it ends.
    """
    module = trainings
    functions = ["train_on_images", "fit_head"]
    if command == "study":
        module = kinds
        functions = ["train_on_images"]
    number = 0

    def train(original: Callable[..., object], task: Task, **how: object) -> object:
        nonlocal number
        number += 1

        def interrupt_when_due(progress: Progress) -> None:
            if when(number, progress):
                raise error

        return original(replace(task, on_progress=interrupt_when_due), **how)

    with pytest.MonkeyPatch.context() as patch:
        # progress is reported at every step, however quick
        patch.setattr("vitlens.training.loop.PROGRESS_INTERVAL", 0.0)
        for name in functions:
            patch.setattr(module, name, partial(train, getattr(module, name)))
        yield


def kept_run(folder: Path, *, saved_after: Sequence[int], epochs: int) -> Path:
    """Return a run of so many epochs with stored random weights after some of them."""

    def made(seed: int) -> Model:
        shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
        return untrained("vit-mini", classes=CLASSES, seed=seed, overrides=shape)

    for epoch in saved_after:
        keep_weights(folder, made(epoch), epochs=epoch)
    save(made(epochs), folder / "model.safetensors")
    lines = []
    for epoch in range(epochs):
        metrics = EpochMetrics(
            epoch,
            step=epoch + 1,
            images=8,
            learning_rate=1e-3,
            train_loss=1.0,
            train_accuracy=0.5,
            test_loss=None,
            test_accuracy=None,
            seconds=1.0,
            images_per_second=8.0,
        )
        fields = asdict(metrics)
        del fields["gradient_norm"]  # older files have none
        lines.append(json.dumps(fields) + "\n")
    write_text(folder / METRICS_FILE, "".join(lines))
    return folder

"""One training in a process of its own: python -m tests.kit.training_job FOLDER BATCH ACCUMULATE [at N | writing N].

Ends itself with SIGKILL where asked: at a step, or half-way through writing its N-th checkpoint. BATCH 0: the recipe's.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.kit.trainings import TEST, TRAIN, tiny_model, tiny_recipe, tiny_split
from vitlens.training import checkpoint, loop
from vitlens.training.metrics import Progress


def main(folder: str, batch: str, accumulate: str, way: str = "", number: str = "0") -> None:
    torch.set_num_threads(1)
    loop.PROGRESS_INTERVAL = 0.0
    if way == "writing":
        kill_while_writing(int(number))

    def heard(progress: Progress) -> None:
        if way == "at" and progress.step == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    model, train, recipe, precision = tiny_model(), TRAIN, tiny_recipe(), "auto"
    if int(batch):
        # what is drawn per process would differ between one and two of them, and bf16 rounds too coarsely to compare;
        # an epoch of one step tells each step's loss
        model, train, precision = tiny_model(drop_path=0.0, dropout=0.0), tiny_split("train", 8), "fp32"
        recipe = tiny_recipe(epochs=20, evaluate_every=5, batch_size=int(batch), accumulate=int(accumulate))
    loop.fit(
        model, train, TEST, recipe=recipe, directory=Path(folder), precision=precision, checkpoint_every=3,
        on_progress=heard,
    )  # fmt: skip


def kill_while_writing(number: int) -> None:
    """Die in the middle of the number-th checkpoint."""
    write, calls = checkpoint.save_file, []

    def half(tensors: Any, path: str, **settings: Any) -> None:
        calls.append(path)
        write(tensors, path, **settings)
        if len(calls) == number:
            os.truncate(path, Path(path).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_file = half


if __name__ == "__main__":
    main(*sys.argv[1:])

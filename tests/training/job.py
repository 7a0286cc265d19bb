"""One training in a process of its own: python -m tests.training.job FOLDER [--kill-at N | --kill-writing N].

Ends itself with SIGKILL where asked: at a step, or half-way through writing its N-th checkpoint.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.training.tiny import tiny_model, tiny_recipe, tiny_split
from vitlens.training import checkpoint, loop
from vitlens.training.metrics import Progress
from vitlens.training.recipe import Recipe


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--kill-writing", type=int)
    parser.add_argument("--steady", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loop.PROGRESS_INTERVAL = 0.0
    if options.kill_writing:
        kill_while_writing(options.kill_writing)

    def heard(progress: Progress) -> None:
        if progress.step == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    # what is drawn per process would differ between one and two of them; an epoch of one step tells each step's loss
    rates = {"drop_path": 0.0, "dropout": 0.0} if options.steady else {}
    loop.fit(
        tiny_model(**rates),
        tiny_split("train", 8 if options.steady else 40),
        tiny_split("test", 12),
        recipe=steady_recipe(options.batch, options.accumulate) if options.steady else tiny_recipe(),
        directory=options.folder,
        precision="fp32" if options.steady else "auto",  # bf16 rounds too coarsely to compare
        checkpoint_every=3,
        on_progress=heard,
    )


def steady_recipe(batch: int, accumulate: int) -> Recipe:
    return tiny_recipe(epochs=20, evaluate_every=5, batch_size=batch, accumulate=accumulate)


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
    main()

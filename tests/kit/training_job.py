"""A training that dies while it writes its N-th checkpoint.

Run it by python -m tests.kit.training_job FOLDER N.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.kit.trainings import trained
from vitlens.training import checkpoint


def main(folder: str, number: str) -> None:
    write = checkpoint.save_file
    calls = []

    def half(tensors: Any, path: str, **settings: Any) -> None:
        calls.append(path)
        write(tensors, path, **settings)
        if len(calls) == int(number):
            os.truncate(path, Path(path).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_file = half
    torch.set_num_threads(1)
    trained(Path(folder), checkpoint_every=3)


if __name__ == "__main__":
    main(*sys.argv[1:])

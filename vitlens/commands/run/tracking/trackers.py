"""TensorBoard and Weights & Biases, through accelerate's trackers.

A tracker opens with its first value, after the processes have joined. If one fails, this is printed once, and the
training goes on without it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlens.errors import InputError
from vitlens.names import TrackerName

PROJECT = "vitlens"  # of W&B
_WANDB_VARIABLES = ("WANDB_MODE", "WANDB_API_KEY")  # with either set, the user has chosen how W&B runs
_NETRC = (".netrc", "_netrc")  # where `wandb login` notes an account


def require_trackers(names: Sequence[TrackerName]) -> None:
    """Raise InputError, with what to type, unless the library of every tracker is installed."""
    for name in names:
        if find_spec(name) is None:
            raise InputError(f"expected the library of --track {name}, found it not installed; type pip install {name}")


class Tracker:
    """One tracker of one run: numbers and pictures by name, over steps.

    name: which; folder: the run's, which gets tensorboard/ or wandb/; config: what decides the run, for the tracker's
    table of settings; say: called once with a message, if the tracker fails.
    """

    def __init__(
        self, name: TrackerName, folder: Path, *, config: Mapping[str, object], say: Callable[[str], None]
    ) -> None:
        self.name, self.folder, self.config, self.say = name, folder, config, say
        self.failed = False
        self._backend: Any = None

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Log numbers by name; step: the number of updates."""
        self._attempt(lambda: self._open(step).log(dict(values), step=step))

    def show(self, name: str, picture: NDArray[np.uint8], *, step: int) -> None:
        """Log an image (height, width, 3); step: the number of updates."""
        settings = {"dataformats": "NHWC"} if self.name == "tensorboard" else {}  # W&B's default
        self._attempt(lambda: self._open(step).log_images({name: picture[None]}, step=step, **settings))

    def close(self) -> None:
        """Write what is not written yet."""
        if self._backend is not None:
            # not by Accelerator.end_training, which ends the group of processes as well
            self._attempt(self._backend.finish)

    def _attempt(self, act: Callable[[], object]) -> None:
        """Call it, unless the tracker has failed before."""
        if self.failed:
            return
        try:
            act()
        except Exception as error:
            self.failed = True
            reason = " ".join(str(error).split()) or type(error).__name__
            self.say(f"{self.name} failed and is left out from here on ({reason}); the training goes on")

    def _open(self, step: int) -> Any:
        """The library's tracker, which begins at this step."""
        if self._backend is None:
            # not by Accelerator(log_with=...): a second Accelerator would share, and change, the first one's state
            from accelerate.tracking import TensorBoardTracker, WandBTracker

            if self.name == "tensorboard":
                # a resumed run overwrites what was logged after its checkpoint
                resumed = {"purge_step": step} if step > 1 else {}
                self._backend = TensorBoardTracker("tensorboard", str(self.folder), **resumed)
            else:
                self._backend = WandBTracker(PROJECT, **_wandb_settings(self.folder))
            self._backend.start()
            self._backend.store_init_configuration(_flat(self.config))
        return self._backend


def _wandb_settings(folder: Path) -> dict[str, object]:
    """Arguments of wandb.init: files in the run's folder, nothing printed, offline where there is no account."""
    import wandb

    account = any(os.environ.get(name) for name in _WANDB_VARIABLES) or any(map(_notes_account, _NETRC))
    return {
        "name": folder.name,
        "dir": str(folder),
        "settings": wandb.Settings(silent=True, console="off"),
        **({} if account else {"mode": "offline"}),
    }


def _notes_account(name: str) -> bool:
    path = Path.home() / name
    return path.is_file() and "wandb" in path.read_text(errors="replace")


def _flat(value: Mapping[str, object], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested settings as one level of dotted names; what trackers cannot hold becomes text."""
    flat: dict[str, bool | int | float | str] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{name}.")
        else:
            flat[prefix + name] = item if isinstance(item, bool | int | float | str) else str(item)
    return flat

"""Weights kept while training, so that one can see afterwards how the model came to be: a file every so many epochs."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vitlens.errors import InputError
from vitlens.models import zoo
from vitlens.models.model import Model
from vitlens.training.checkpoint import told_as_storage
from vitlens.training.defaults import KEPT_FOLDER
from vitlens.training.metrics import read_metrics

FOLDER = KEPT_FOLDER
_NAME = re.compile(r"epoch-(\d{4,})\.safetensors")


@dataclass(frozen=True)
class Kept:
    """Weights at one moment of a training: after how many epochs (0: before the first), and the file that has them."""

    epochs: int
    file: Path


def require_interval(every: int | None) -> None:
    """Raise InputError unless epochs between kept weights are at least 1 (None: none are kept)."""
    if every is not None and every < 1:
        raise InputError(f"expected --keep-every at least 1, found {every}; leave it out to keep none")


def keep_weights(folder: Path, model: Model, *, epochs: int) -> None:
    """Write the model's present weights, in half precision, as those after so many epochs; all or nothing."""
    path = folder / FOLDER / f"epoch-{epochs:04}.safetensors"
    with told_as_storage(path):
        zoo.save(model, path, half=True)


def read_kept(folder: Path) -> tuple[Kept, ...]:
    """The kept weights of a training folder by epoch; none where there are none."""
    found = ((_NAME.fullmatch(path.name), path) for path in (folder / FOLDER).glob("*.safetensors"))
    return tuple(sorted((Kept(int(match[1]), path) for match, path in found if match), key=lambda kept: kept.epochs))


def forget_after(folder: Path, epochs: int) -> None:
    """Take away what was kept after so many epochs (-1: all), and what a kill while writing left behind."""
    unwanted = [kept.file for kept in read_kept(folder) if kept.epochs > epochs]
    for path in (*unwanted, *(folder / FOLDER).glob(".epoch-*.safetensors")):
        with suppress(OSError):
            path.unlink()


def weights_over_training(folder: Path) -> tuple[Kept, ...]:
    """The kept weights and, at the end, the last ones (model.safetensors, in full precision).

    Empty for a folder without kept weights. Raises InputError where metrics.jsonl is missing or broken.
    """
    kept = read_kept(folder)
    if not kept:
        return ()
    done = len(read_metrics(folder))
    last = folder / zoo.WEIGHTS_FILE
    if not last.is_file():  # stopped within its first epoch
        return kept
    return (*(one for one in kept if one.epochs < done), Kept(done, last))

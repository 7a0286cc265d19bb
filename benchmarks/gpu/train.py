"""Training on CIFAR-10 (JPEG) for some minutes: the rate, the accuracy, ResNet-18 beside it, and
distillation from it.

The number of epochs is chosen from a measured epoch, so that the whole schedule takes the minutes;
it is kept beside the checkpoint, from which the next command goes on. A case is measured when its
last epoch is done.
"""

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from torch import Tensor

from benchmarks.gpu.plain_loop import BATCH, plain_rate
from benchmarks.gpu.session import Session, Values
from vitlens.data.catalogue import load_data
from vitlens.data.split import InMemory, Split
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.files import write_json
from vitlens.models import saved
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.training.distill import Distillation, StandardObjective, Teacher
from vitlens.training.loop import fit
from vitlens.training.metrics import TrainingResult
from vitlens.training.recipe import Recipe, override, recipe_for
from vitlens.uncertainty import wilson

TOLERANCE: Final = 5e-3  # fp32, of logits: AdamW makes a whole step of the sign of a tiny gradient
_WORKERS: Final = 8  # of the plain loop, at most
_WARM: Final = 2  # epochs of the measured rate; the first compiles


@dataclass(frozen=True)
class Case:
    """A training: the preset, its changes, and the case whose model teaches it, or ""."""

    preset: str
    overrides: Mapping[str, Any]
    teacher: str = ""


CASES: Final = {
    "vit-tiny": Case("vit-tiny", {}),
    "resnet18": Case("resnet18", {}),
    "vit-tiny distilled from resnet18": Case("vit-tiny", {"distillation": True}, "resnet18"),
}
_LITTLE: Final = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
TINY_CASES: Final = {
    "vit-tiny": Case("vit-mini", _LITTLE),
    "resnet18": Case("resnet20", {}),
    "vit-tiny distilled from resnet18": Case(
        "vit-mini", {**_LITTLE, "distillation": True}, "resnet18"
    ),
}


def run(session: Session) -> None:
    """Run the check and the rates, then train each case until its epochs or the time are over."""
    session.check(
        "logits after 3 steps of training", partial(_check, session.folder), tolerance=TOLERANCE
    )
    folder = _data(session)
    splits = load_data(str(folder), part="train"), load_data(str(folder), part="test")
    session.case(
        "rate beside a DataLoader loop",
        partial(_rate, session, folder, splits[0]),
        batch=BATCH,
        needs=60,
    )
    for name in CASES:
        title = f"{name}, {session.minutes:g} minutes"
        session.case(title, partial(_trained, session, name, splits), batch=BATCH, needs=20)


def _cases(session: Session) -> Mapping[str, Case]:
    return TINY_CASES if session.tiny else CASES


def _check(folder: Path, device: torch.device) -> Tensor:
    """Return the logits of a small ViT after three steps on random images."""
    pixels = torch.randint(
        0, 256, (24, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    split = Split(
        "random", "train", InMemory(pixels), (32, 32), ("a", "b"), labels=torch.arange(24) % 2
    )
    model = untrained("vit-mini", classes=split.classes, overrides=_LITTLE)
    recipe = Recipe(epochs=1, batch_size=8)
    fit(
        model,
        split,
        split,
        recipe=recipe,
        directory=folder / "check",
        device=device,
        precision="fp32",
        compiling="off",
    )
    with torch.no_grad(), evaluating(model):
        logits: Tensor = model(pixels[:8].to(device).float() / 255)
    return logits


def _data(session: Session) -> Path:
    """Return the folder with train/ and test/: the one that was given, or what the zips hold; small
    random images if tiny.
    """
    if session.tiny and not session.data:
        return _random_files(session.folder / "random")
    if len(session.data) == 1 and session.data[0].is_dir():
        return session.data[0]
    if len(session.data) != 2:
        raise InputError(
            "expected the images of CIFAR-10 (JPEG), found none; add --data TRAIN.zip,TEST.zip"
        )
    folder = session.folder / "data"
    for path in session.data:
        done = folder / f"{path.stem}.done"
        if not done.exists():
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)
            done.touch()
    return folder


def _random_files(folder: Path) -> Path:
    for part, count in (("train", 2 * BATCH + 8), ("test", 16)):
        pixels = torch.randint(
            0, 256, (count, 32, 32, 3), generator=torch.Generator().manual_seed(0)
        )
        for index, array in enumerate(pixels.byte().numpy()):
            path = folder / part / ("even", "odd")[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(path)
    return folder


def _model(session: Session, name: str, classes: tuple[str, ...]) -> Model:
    case = _cases(session)[name]
    return untrained(case.preset, classes=classes, overrides=dict(case.overrides))


def _recipe(epochs: int) -> Recipe:
    return override(recipe_for("vit-tiny", "cifar10", named="short"), {"epochs": epochs})


def _fit(
    session: Session, model: Model, splits: tuple[Split, Split], epochs: int, **more: Any
) -> TrainingResult:
    return fit(
        model,
        *splits,
        recipe=_recipe(epochs),
        device=session.device,
        precision="fp32" if session.tiny else "bf16",
        compiling="off" if session.tiny else "on",
        **more,
    )


def _rate(session: Session, folder: Path, train: Split, batch: int) -> Values:
    """Return images a second of training (the second of two epochs) and of the plain loop."""
    count = len(train) if session.tiny else min(len(train), 200 * batch)
    name = "vit-tiny"
    ours = _measured(session, name, train, count)
    workers = min(_WORKERS, os.cpu_count() or 1) if not session.tiny else 1
    precision = "fp32" if session.tiny else "bf16"
    theirs = plain_rate(
        folder,
        _cases(session)[name].preset,
        count - batch,
        precision,
        device=session.device,
        workers=workers,
    )
    return {
        "images/s": ours[0],
        "plain loop (images/s)": theirs,
        "times the plain loop": ours[0] / theirs,
    }


def _measured(session: Session, name: str, train: Split, count: int) -> tuple[float, float]:
    """Images a second in the second epoch, and the seconds that the first took longer:
    compilation."""
    part = train.limit(count)
    result = _fit(
        session,
        _model(session, name, train.classes),
        (part, part.limit(64)),
        _WARM,
        directory=session.folder / "rate",
    )
    first, second = (epoch.images_per_second for epoch in result.history)
    return second, max(0.0, count / first - count / second)


def _trained(session: Session, name: str, splits: tuple[Split, Split], batch: int) -> Values:
    """Train, or go on; the accuracy of the last weights on the test images."""
    del batch  # the recipe's
    case = _cases(session)[name]
    folder = _folder(session, name)
    epochs = _planned(session, folder, name, splits[0])
    model = _model(session, name, splits[0].classes)
    more: dict[str, Any] = {}
    if case.teacher:
        more["objective"] = _objective(session, case.teacher, splits[0].classes)
    result = _fit(session, model, splits, epochs, directory=folder, resume=True, **more)
    plain_ = _accuracy_of(session, "vit-tiny") if case.teacher else None
    interval = wilson(round(result.accuracy * len(splits[1])), len(splits[1]))
    return {
        "images/s": result.history[-1].images_per_second,
        "accuracy": result.accuracy,
        "95 % interval": f"{interval.low:.3f} to {interval.high:.3f}",
        "test images": len(splits[1]),
        "epochs": epochs,
        "seconds": result.seconds,
        "points above the same without a teacher": None
        if plain_ is None
        else 100 * (result.accuracy - plain_),
    }


def _folder(session: Session, name: str) -> Path:
    size = "tiny" if session.tiny else f"{session.minutes:g}-minutes"
    return session.folder / size / name.replace(" ", "-")


def _planned(session: Session, folder: Path, name: str, train: Split) -> int:
    """Return the epochs that take the minutes, compilation and tests included; written down when
    the training begins.
    """
    plan = folder / "plan.json"
    if plan.exists():
        return int(json.loads(plan.read_text())["epochs"])
    folder.mkdir(parents=True, exist_ok=True)
    epochs = 2
    if not session.tiny:
        rate, once = _measured(session, name, train, min(len(train), 100 * BATCH))
        per_epoch = 1.05 * len(train) / rate  # with its test and its files
        epochs = max(1, int((60 * session.minutes - once) / per_epoch))
    write_json(plan, {"epochs": epochs, "case": name, "minutes": session.minutes})
    return epochs


def _objective(session: Session, teacher: str, classes: tuple[str, ...]) -> StandardObjective:
    weights = _folder(session, teacher) / saved.WEIGHTS_FILE
    known = Teacher(
        load(str(weights.parent), device=session.device),
        classes=classes,
        precision="fp32" if session.tiny else "bf16",
    )
    return StandardObjective(known, Distillation(), {"distillation": {"teacher": known.identity()}})


def _accuracy_of(session: Session, name: str) -> float | None:
    """Return the accuracy of another training of as many minutes, from its row."""
    row = session.known(f"{name}, {session.minutes:g} minutes")
    return None if row is None else float(row.values["accuracy"] or 0)

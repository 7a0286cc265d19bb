"""Train the two pairs of models that come with the package, with equal budgets, and write one seed of each.

    OMP_NUM_THREADS=1 nice python -m benchmarks.bundle train runs/bundle [NAME ...] [--seeds 0 1 2]
    python -m benchmarks.bundle test runs/bundle     # the accuracies on the test part, as Markdown
    python -m benchmarks.bundle write runs/bundle    # seed 0 of each, in half precision

`vit-digits` and `cnn-digits` are trained on `digits`, `vit-shortcut` and `cnn-shortcut` on `digits-shortcut`. All four
start from the weights of the earlier bundled pair (git commit START), which was trained on easier scenes. They see as
many scenes in as many steps, with the same shifts. Seeds differ in the scenes that are drawn and in their order.

Accuracy is followed on a validation part without the shortcut: 15 digits of each class that are taken from the training
part, three scenes each. Settings were chosen by it. The test part is read by `test` only.
"""

import argparse
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

import vitlens
from vitlens.data.digits import TRAIN_SCENES, digits
from vitlens.data.split import InMemory, Split
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.saved import save
from vitlens.names import BUNDLED
from vitlens.training.loop import fit
from vitlens.training.recipe import Recipe
from vitlens.uncertainty import bootstrap_difference, share_of

START: Final = "752b4417"  # the commit with the weights of the earlier pair
LIMIT: Final = 7_000_000  # bytes, all four together
VALIDATION: Final = 15  # digits of each class
VALIDATION_SCENES: Final = 3
SEEDS: Final = (0, 1, 2)
BUNDLED_SEED: Final = 0  # fixed before any model was tested
RECIPE: Final = Recipe(
    epochs=7,
    batch_size=64,
    crop_padding=2,
    average=0.99,
    weight_decay=0.05,
    optimiser="muon",
    learning_rate=1e-3,
)


def parts(*, shortcut: bool, seed: int = 0) -> tuple[Split, Split]:
    """Return the training part, its scenes drawn with a seed, and the validation part, which never has the shortcut."""
    train = digits("train", shortcut=shortcut, seed=seed)
    whole = digits("train")
    assert whole.labels is not None
    sources = len(whole) // TRAIN_SCENES  # scene k of digit i is image k * sources + i
    labels = whole.labels[:sources]
    held_out = torch.cat([(labels == label).nonzero()[:VALIDATION, 0] for label in range(len(whole.classes))])
    mask = torch.zeros(sources, dtype=torch.bool)
    mask[held_out] = True
    scenes = torch.arange(TRAIN_SCENES)[:, None] * sources
    train = train.pick((scenes + (~mask).nonzero()[:, 0]).flatten())
    validation = whole.pick((scenes[:VALIDATION_SCENES] + held_out).flatten())
    pixels = validation.source.read(torch.arange(len(validation)))
    return train, replace(validation, source=InMemory(pixels), part="test")


def starting_model(name: str, folder: Path) -> Model:
    """Return the model of the earlier pair with the architecture of a bundled name; its weights go into a folder."""
    earlier = "vit-digits" if name.startswith("vit") else "cnn-digits"
    path = f"{START}:vitlens/models/bundled/{earlier}/model.safetensors"
    weights = subprocess.run(["git", "show", path], check=True, capture_output=True).stdout  # noqa: S607
    file = folder / "start.safetensors"
    file.write_bytes(weights)
    return load(str(file))


def train(name: str, seed: int, directory: Path, recipe: Recipe = RECIPE) -> None:
    """Train one model; metrics.jsonl of the folder holds the loss and the validation accuracy of the epochs."""
    training, validation = parts(shortcut=name.endswith("shortcut"), seed=seed)
    directory.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    result = fit(
        starting_model(name, directory),
        training,
        validation,
        recipe=recipe,
        directory=directory,
        seed=seed,
        resume=True,
    )
    seconds = time.process_time() - began
    print(f"{name} seed {seed}: validation {result.test_accuracy:.3f}, {seconds:.0f} s of CPU", flush=True)

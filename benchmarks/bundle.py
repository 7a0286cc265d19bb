"""Trains the pair of models that comes with the package, with equal budgets, and writes it in half precision.

    OMP_NUM_THREADS=1 python -m benchmarks.bundle train vit-micro runs/vit-digits &
    OMP_NUM_THREADS=1 python -m benchmarks.bundle train resnet20 runs/cnn-digits
    python -m benchmarks.bundle write runs/vit-digits runs/cnn-digits
    vitlens evaluate vit-digits cnn-digits --data digits

Both models see the same scenes in the same order, the same shifts and the same number of steps. Accuracy is
followed on a validation part: 15 digits of each class that are taken from the training part, three scenes each. The
settings were not searched. The test part is not read here.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

import vitlens
from vitlens.data.digits import TRAIN_SCENES, digits
from vitlens.data.split import InMemory, Split
from vitlens.models.loading import load, untrained
from vitlens.models.saved import save
from vitlens.names import BUNDLED
from vitlens.training.loop import fit
from vitlens.training.recipe import Recipe

LIMIT = 3_000_000  # bytes, both together
VALIDATION = 15  # digits of each class
SHARED = Recipe(epochs=110, batch_size=128, crop_padding=2, average=0.999, weight_decay=0.05, evaluate_every=5)
RECIPES = {
    "vit-micro": replace(SHARED, optimiser="muon", learning_rate=2e-3, drop_path=0.05),
    "resnet20": replace(SHARED, optimiser="muon", learning_rate=2e-3),
}


def parts() -> tuple[Split, Split]:
    """The training and the validation part of the embedded training digits."""
    whole = digits("train")
    assert whole.labels is not None
    sources = len(whole) // TRAIN_SCENES  # scene k of digit i is image k * sources + i
    labels = whole.labels[:sources]
    held_out = torch.cat([(labels == label).nonzero()[:VALIDATION, 0] for label in range(len(whole.classes))])
    mask = torch.zeros(sources, dtype=torch.bool)
    mask[held_out] = True
    scenes = torch.arange(TRAIN_SCENES)[:, None] * sources
    train = whole.pick((scenes + (~mask).nonzero()[:, 0]).flatten())
    validation = whole.pick((scenes[:3] + held_out).flatten())
    drawn = validation.source.read(torch.arange(len(validation)))
    return train, replace(validation, source=InMemory(drawn), part="test")


def train(preset: str, directory: Path, epochs: int | None = None) -> None:
    """Train one model; metrics.jsonl of the folder holds the loss and the validation accuracy of the epochs."""
    training, validation = parts()
    recipe = RECIPES[preset]
    if epochs is not None:
        recipe = replace(recipe, epochs=epochs, evaluate_every=1)
    directory.mkdir(parents=True, exist_ok=True)
    model = untrained(preset, classes=training.classes)
    result = fit(model, training, validation, recipe=recipe, directory=directory, resume=True)
    print(preset, result)


def write(folders: list[str]) -> None:
    """Write both models into the package."""
    place = Path(vitlens.__file__).parent / "models" / "bundled"
    files = [place / name / "model.safetensors" for name in BUNDLED]
    for folder, file in zip(folders, files, strict=True):
        save(load(folder), file, half=True)
    size = sum(file.stat().st_size for file in files)
    print(f"{size:,} bytes, {LIMIT:,} allowed")
    if size > LIMIT:
        sys.exit("too large to come with the package")


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
    else:
        write(sys.argv[2:])

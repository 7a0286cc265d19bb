"""Train the two pairs of models that come with the package, with equal budgets, and write one seed
of each.

    OMP_NUM_THREADS=1 nice python -m benchmarks.bundle train runs/bundle [NAME ...] [--seeds 0 1 2]
    python -m benchmarks.bundle test runs/bundle     # the accuracies on the test part, as Markdown
    python -m benchmarks.bundle write runs/bundle    # seed 0 of each, in half precision

`vit-digits` and `cnn-digits` are trained on `digits`, `vit-shortcut` and `cnn-shortcut` on
`digits-shortcut`. All four start from the weights of the earlier bundled pair (git commit START),
which was trained on easier scenes. They see as many scenes in as many steps, with the same shifts.
Seeds differ in the scenes that are drawn and in their order.

Accuracy is followed on a validation part without the shortcut: 15 digits of each class that are
taken from the training part, three scenes each. Settings were chosen by it. The test part is read
by `test` only.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

import vitlens
from vitlens.data.digits import TRAIN_SCENES, digits
from vitlens.data.split import InMemory, Split
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.saved import save
from vitlens.names import BUNDLED
from vitlens.training.loop import fit
from vitlens.training.recipe import Recipe
from vitlens.uncertainty import Estimate, share_of

START: Final = "752b4417"  # the commit with the weights of the earlier pair
LIMIT: Final = 7_000_000  # bytes, all four together
VALIDATION: Final = 15  # digits of each class
VALIDATION_SCENES: Final = 3
SEEDS: Final = (0, 1, 2)
BUNDLED_SEED: Final = 0  # fixed before any model was tested
DRAWS: Final = 10_000
RECIPE: Final = Recipe(
    epochs=7,
    batch_size=64,
    crop_padding=2,
    average=0.99,
    weight_decay=0.05,
    optimiser="muon",
    learning_rate=2e-3,
)


def parts(*, shortcut: bool, seed: int = 0) -> tuple[Split, Split]:
    """Return the training part, its scenes drawn with a seed, and the validation part, which never
    has the shortcut.
    """
    train = digits("train", shortcut=shortcut, seed=seed)
    whole = digits("train")
    assert whole.labels is not None
    sources = len(whole) // TRAIN_SCENES  # scene k of digit i is image k * sources + i
    labels = whole.labels[:sources]
    held_out = torch.cat(
        [(labels == label).nonzero()[:VALIDATION, 0] for label in range(len(whole.classes))]
    )
    mask = torch.zeros(sources, dtype=torch.bool)
    mask[held_out] = True
    scenes = torch.arange(TRAIN_SCENES)[:, None] * sources
    train = train.pick((scenes + (~mask).nonzero()[:, 0]).flatten())
    validation = whole.pick((scenes[:VALIDATION_SCENES] + held_out).flatten())
    pixels = validation.source.read(torch.arange(len(validation)))
    return train, replace(validation, source=InMemory(pixels), part="test")


def starting_model(name: str, folder: Path) -> Model:
    """Return the model of the earlier pair with the architecture of a bundled name; its weights go
    into a folder.
    """
    earlier = "vit-digits" if name.startswith("vit") else "cnn-digits"
    path = f"{START}:vitlens/models/bundled/{earlier}/model.safetensors"
    weights = subprocess.run(["git", "show", path], check=True, capture_output=True).stdout
    file = folder / "start.safetensors"
    file.write_bytes(weights)
    return load(str(file))


def train(name: str, seed: int, directory: Path, recipe: Recipe = RECIPE) -> None:
    """Train one model; metrics.jsonl of the folder holds the loss and the validation accuracy of
    the epochs.
    """
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
    print(
        f"{name} seed {seed}: validation {result.accuracy:.3f}, {seconds:.0f} s of CPU", flush=True
    )


def train_all(folder: Path, names: list[str], seeds: list[int]) -> None:
    """Train the models of these names that have no final weights yet, seed 0 of all of them
    first."""
    for seed in seeds:
        for name in names:
            train(name, seed, folder / f"{name}-{seed}")


def gap_of(
    correct: NDArray[np.bool_], agrees: NDArray[np.bool_], groups: NDArray[np.int64]
) -> Estimate:
    """Return accuracy where the hue agrees minus where it does not, in points, bootstrapped over
    source digits.
    """
    _, group = np.unique(groups, return_inverse=True)
    count = int(group.max()) + 1
    sums = [
        np.bincount(group, weights=weights.astype(float), minlength=count)
        for weights in (correct & agrees, agrees, correct & ~agrees, ~agrees)
    ]
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    right_agreeing, agreeing, right_others, others = (drawn @ values for values in sums)
    low, high = np.quantile(
        100 * (right_agreeing / agreeing - right_others / others), (0.025, 0.975)
    )
    gap = 100 * (correct[agrees].mean() - correct[~agrees].mean())
    return Estimate(float(gap), float(low), float(high), len(correct), "points")


def test(folder: Path) -> None:
    """Print the accuracy of every trained model on the test part, as a Markdown table."""
    split = digits("test")
    assert split.factors is not None
    assert split.groups is not None
    agrees = split.factors["hue_agrees"].astype(bool)
    groups = split.groups.numpy()
    print(
        f"n = {len(split):,} scenes of {len(np.unique(groups))} source digits; the hue agrees in "
        f"{agrees.sum()}"
    )
    print("| model | seed | accuracy | where the hue agrees | where it does not | gap, points |")
    print("|---|---|---|---|---|---|")
    for name in BUNDLED:
        for seed in SEEDS:
            model = load(str(folder / f"{name}-{seed}"))
            correct = vitlens.evaluate(model, split).correct.numpy()
            shares = [
                share_of(correct[chosen], groups=groups[chosen])
                for chosen in (np.ones_like(agrees), agrees, ~agrees)
            ]
            cells = [
                f"{100 * e.value:.1f} % ({100 * e.low:.1f} to {100 * e.high:.1f})" for e in shares
            ]
            gap = gap_of(correct, agrees, groups)
            print(
                f"| `{name}` | {seed} | {' | '.join(cells)} | {gap.value:.1f} ({gap.low:.1f} to "
                f"{gap.high:.1f}) |"
            )


def write(folder: Path) -> None:
    """Write one seed of each model into the package."""
    place = Path(vitlens.__file__).parent / "models" / "bundled"
    files = [place / name / "model.safetensors" for name in BUNDLED]
    for name, file in zip(BUNDLED, files, strict=True):
        file.parent.mkdir(exist_ok=True)
        save(load(str(folder / f"{name}-{BUNDLED_SEED}")), file, half=True)
    size = sum(file.stat().st_size for file in files)
    print(f"{size:,} bytes, {LIMIT:,} allowed")
    if size > LIMIT:
        sys.exit("too large to come with the package")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, test or write the bundled models.")
    parser.add_argument("step", choices=("train", "test", "write"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=BUNDLED)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    arguments = parser.parse_args()
    if arguments.step == "train":
        train_all(arguments.folder, list(arguments.names), list(arguments.seeds))
    elif arguments.step == "test":
        test(arguments.folder)
    else:
        write(arguments.folder)

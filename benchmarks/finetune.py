"""An epoch of training a frozen model's head on cached features, compared with one that runs the
backbone each time.

    python benchmarks/finetune.py --weights deit_tiny.safetensors --data FOLDER [--images 400]
        [--epochs 3]

Same model, images, recipe, seed and precision, in one process and in alternation: first the epochs
with the backbone, then those without. The resulting weights must agree to 1e-3 of their size and
the accuracies be equal; the ratio of the training times of an epoch (without evaluation and files)
must be at least 20.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from vitlens.data.catalogue import load_data
from vitlens.models.loading import load
from vitlens.models.rebuild import classifiers, for_classes
from vitlens.training.head import fit_head
from vitlens.training.loop import train_on_images
from vitlens.training.metrics import TrainingResult
from vitlens.training.recipe import FROZEN, override
from vitlens.training.task import Task

MUST = 20


def epoch_seconds(result: TrainingResult) -> float:
    """Return the median time of an epoch's steps, from what metrics.jsonl says of each."""
    images = result.history[0].images
    return statistics.median(images / epoch.images_per_second for epoch in result.history)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="timm:deit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument(
        "--images", type=int, default=400, help="of the training part; half as many to test"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    model = load(options.model, weights=options.weights)
    train, test = (
        load_data(options.data, part=part, preprocessing=model.preprocessing).limit(count)
        for part, count in (("train", options.images), ("test", options.images // 2))
    )
    recipe = override(
        FROZEN, {"epochs": options.epochs, "batch_size": 64, "evaluate_every": options.epochs}
    )
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.precision}; "
        f"{options.model}, ",
        end="",
    )
    print(
        f"{len(train)} images to train on, {len(test)} to test, {options.epochs} epochs, "
        f"{recipe.batch_size} a step"
    )
    results = {}
    heads = {}
    seconds = {}
    for way, run in (("backbone", train_on_images), ("cached", fit_head)):
        mine = for_classes(model, train.classes)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            results[way] = run(
                Task(
                    mine,
                    train,
                    test,
                    recipe,
                    Path(folder),
                    precision=options.precision,
                    train_last=0,
                )
            )
        seconds[way] = time.perf_counter() - began
        (name,) = classifiers(mine)
        heads[way] = mine.module.get_submodule(name).weight.detach().clone()
        print(
            f"{way:9} {epoch_seconds(results[way]):8.4f} s an epoch, {seconds[way]:6.1f} s in "
            "all, ",
            end="",
        )
        print(f"test accuracy {100 * results[way].accuracy:.1f} %", flush=True)
    difference = (heads["backbone"] - heads["cached"]).norm() / heads["backbone"].norm()
    ratio = epoch_seconds(results["backbone"]) / epoch_seconds(results["cached"])
    print(
        f"heads differ by {difference:.1e} of their size; an epoch is {ratio:,.0f} times faster "
        f"(must be {MUST})"
    )
    assert difference < 1e-3, "the two ways must learn the same head"
    assert results["backbone"].accuracy == results["cached"].accuracy
    assert ratio >= MUST


if __name__ == "__main__":
    main()

"""Memory of a training over many optimiser steps: it must stay flat.

    python benchmarks/train_memory.py [--steps 10000]

A small ViT on random images, with everything that keeps state between steps (Muon, averaged
weights, RandAugment, erasing, CutMix); the process's resident memory after a tenth of the steps and
at the end.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from vitlens.data.split import InMemory, Split
from vitlens.models.loading import untrained
from vitlens.training.loop import fit
from vitlens.training.metrics import Progress
from vitlens.training.recipe import Recipe

CLASSES = ("a", "b")
BATCH = 16


def resident() -> float:
    """Megabytes of this process in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def split(part: str, count: int) -> Split:
    pixels = torch.randint(
        0, 256, (count, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    return Split(
        "random", part, InMemory(pixels), (16, 16), CLASSES, labels=torch.arange(count) % 2
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    seen: dict[int, float] = {}

    def record_memory(progress: Progress) -> None:
        seen[progress.step] = resident()

    shape = {"dim": 32, "depth": 2, "heads": 2, "drop_path": 0.1}
    model = untrained("vit-mini", classes=CLASSES, image_size=(16, 16), overrides=shape)
    recipe = Recipe(
        epochs=options.steps // 100,
        batch_size=BATCH,
        optimiser="muon",
        average=0.99,
        crop_padding=2,
        flip=True,
        randaugment=1,
        erasing=0.25,
        cutmix=1.0,
        evaluate_every=20,
    )
    with tempfile.TemporaryDirectory() as directory:
        fit(
            model,
            split("train", 100 * BATCH),
            split("test", 64),
            recipe=recipe,
            directory=Path(directory),
            on_progress=record_memory,
        )
    early = [
        memory for step, memory in seen.items() if options.steps / 10 <= step <= options.steps / 5
    ]
    late = [memory for step, memory in seen.items() if step >= options.steps * 0.9]
    first = sum(early) / len(early)
    last = sum(late) / len(late)
    print(
        f"{max(seen):,} steps: {first:.1f} MB in the second tenth, {last:.1f} MB in the last one "
        f"({last / first - 1:+.2%}; largest {max(seen.values()):.1f} MB)"
    )


if __name__ == "__main__":
    main()

"""Images a second of `vitlens train` compared with a plain loop; same model, images, batch,
precision and machine.

    python benchmarks/train_rate.py FOLDER [--model vit-tiny] [--images 1024] [--rounds 5]
        [--precision bf16]

FOLDER holds train/<class>/*.jpg and test/<class>/*.jpg of 32 px. The plain loop is as taught in
courses: ImageFolder, PIL transforms (crop with padding, flip), a DataLoader with 2 workers, AdamW;
in bf16, autocast. The two alternate. Ours is compiled, as `vitlens train` does for long trainings;
compilation takes place in the first epoch, which is not counted and whose time is printed.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms

from vitlens.data.catalogue import load_data
from vitlens.models.loading import untrained
from vitlens.training.loop import fit
from vitlens.training.recipe import override, recipe_for

BATCH = 128


def plain(
    folder: Path,
    name: str,
    count: int,
    precision: str,
    *,
    device: torch.device | str = "cpu",
    workers: int = 2,
) -> float:
    """Images a second of the plain loop, without its first batch, in which the workers start."""
    where = torch.device(device)
    steps = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.5,) * 3, (0.5,) * 3),
        ]
    )
    whole = datasets.ImageFolder(str(folder / "train"), transform=steps)
    chosen = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))[
        : count + BATCH
    ].tolist()
    loader = DataLoader(
        Subset(whole, chosen), batch_size=BATCH, shuffle=True, num_workers=workers, drop_last=True
    )
    model = untrained(name, classes=tuple(whole.classes)).module.train().to(where)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    images = 0
    start = 0.0
    for number, (batch, labels) in enumerate(loader):
        if number == 1:
            start = time.perf_counter()
        batch = batch.to(where)
        labels = labels.to(where)
        with torch.autocast(where.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            logits = model(batch)
        nn.functional.cross_entropy(logits.float(), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        images += len(batch) if number else 0
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return images / (time.perf_counter() - start)


def ours(folder: Path, name: str, count: int, precision: str) -> float:
    """Images a second of our loop in its second epoch, as its own metrics say."""
    train, test = (
        load_data(str(folder), part=part).limit(size)
        for part, size in (("train", count), ("test", BATCH))
    )
    model = untrained(name, classes=train.classes)
    recipe = override(
        recipe_for(name, "cifar10", named="course"), {"epochs": 2, "batch_size": BATCH}
    )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        result = fit(
            model,
            train,
            test,
            recipe=recipe,
            directory=Path(directory),
            precision=precision,
            compiling="on",
        )
    whole = time.perf_counter() - start
    last = count / result.history[-1].images_per_second
    print(
        f"first epoch and compilation {whole - last:.1f} s, second epoch {last:.1f} s", flush=True
    )
    return result.history[-1].images_per_second


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="vit-tiny")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    options = parser.parse_args()
    pairs = []
    for number in range(options.rounds):
        loops = (ours, plain) if number % 2 == 0 else (plain, ours)  # who goes first takes turns
        rates = {
            loop: loop(options.folder, options.model, options.images, options.precision)
            for loop in loops
        }
        pair = rates[ours], rates[plain]
        pairs.append(pair)
        print(
            f"vitlens {pair[0]:7.1f} images/s   plain loop {pair[1]:7.1f} images/s   ratio "
            f"{pair[0] / pair[1]:.2f}"
        )
    print(
        f"{options.model}, {options.precision}, batch {BATCH}, {torch.get_num_threads()} threads: "
        "median ratio "
        f"{statistics.median(a / b for a, b in pairs):.2f}"
    )


if __name__ == "__main__":
    main()

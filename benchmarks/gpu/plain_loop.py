"""A training loop as courses teach it, for the comparison with `vitlens train`: ImageFolder, PIL
transforms (crop with padding, flip), a DataLoader with workers, AdamW; in bf16, autocast.
"""

import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms

from vitlens.models.loading import untrained

BATCH = 128


def plain_rate(
    folder: Path,
    name: str,
    count: int,
    precision: str,
    *,
    device: torch.device | str = "cpu",
    workers: int = 2,
) -> float:
    """Return images a second, without the first batch, in which the workers start.

    folder: holds train/<class>/*.jpg of 32 px.
    """
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

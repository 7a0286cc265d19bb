"""Few images at a time, for tests of several batches; and a source that counts its reads."""

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vitlens
from vitlens import Split

SEEN_AT_ONCE = 4


@dataclass
class Counting:
    """A source that keeps how many images it was requested for at once."""

    pixels: Tensor
    requested: list[int] = field(default_factory=list)
    length: int | None = None

    def __len__(self) -> int:
        return len(self.pixels) if self.length is None else self.length

    def read(self, indices: Tensor) -> Tensor:
        self.requested.append(len(indices))
        return self.pixels[indices]


def counted(
    size: tuple[int, int], classes: tuple[str, ...], *, count: int = 11, length: int | None = None
) -> Split:
    """Draw noise whose source counts; length: that it pretends to have."""
    drawn = torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(0))
    source = Counting((255 * drawn).byte(), length=length)
    return Split(
        "lazy", "test", source, size, classes, labels=torch.arange(len(source)) % len(classes)
    )


def in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no more than four images fit at once."""
    root = Path(vitlens.__file__).parents[1]
    for path in (root / "vitlens").rglob("*.py"):
        if "fitting_batch_size" in path.read_text():
            # also one that was not imported yet, or it would keep the replacement for good
            module = import_module(".".join(path.relative_to(root).with_suffix("").parts))
            if hasattr(module, "fitting_batch_size"):
                monkeypatch.setattr(module, "fitting_batch_size", lambda _: SEEN_AT_ONCE)
    monkeypatch.setattr("vitlens.lens.capture._AT_ONCE", SEEN_AT_ONCE)

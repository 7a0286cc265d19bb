"""One method on every image of a split, batch by batch, with what it cost."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import BACKWARD, fitting_batch_size
from vitlens.attribution.explain import explain
from vitlens.attribution.gradients import logit_gain
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress import Advance
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.models.model import Model
from vitlens.names import Engine


@dataclass(frozen=True)
class Explained:
    """One method on all images of one model: maps (n, rows, columns) on the CPU, raw; seconds: an image; gains: what
    each target's logit has over that of black (n,), None for a method whose maps do not add up to it."""

    method: str
    maps: Tensor
    seconds: float
    gains: Tensor | None = None


def explained(
    model: Model,
    split: Split,
    targets: Tensor | None,
    method: str,
    *,
    engine: Engine = "vitlens",
    options: RunOptions,
    advance: Advance = lambda _: None,
) -> Explained:
    """One method on every image of a split, for target classes (n,); None for a model without a classifier."""
    size = options.batch_size or max(1, fitting_batch_size(model) // BACKWARD)
    maps, gains, seconds = [], [], 0.0
    for batch in split.batches(size, device=model.device):
        own = None if targets is None else targets[batch.indices].to(model.device)
        with autocast(model.device, precision(options)):
            start = time.perf_counter()
            found = explain(
                model, batch.images, targets=own, method=method, engine=engine, batch_size=size, seed=options.seed
            )
            maps.append(found.cpu())  # which waits for a device that works by itself
            seconds += time.perf_counter() - start
            if ATTRIBUTIONS[method].complete and own is not None:
                gains.append(logit_gain(model, batch.images, own).cpu())
        advance(len(found))
    return Explained(method, torch.cat(maps), seconds / len(split), torch.cat(gains) if gains else None)


def precision(options: RunOptions) -> str:
    """fp32 unless bf16 is asked for: attributions are small differences of large numbers."""
    return "bf16" if options.precision == "bf16" else "fp32"

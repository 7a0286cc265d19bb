"""How long a run will take, estimated before it begins: passes through each model times the time of one pass."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import torch

from vitlens.analysis.cost.latency import passes
from vitlens.commands.scaffold.options import RunOptions
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.models.model import Model
from vitlens.report.numbers import in_time

PATIENCE = 120.0  # seconds of a run beyond which its expected duration is printed first
_TIMED = 8  # images in the pass that is timed
_SLOW = 1.0  # seconds of one image, beyond which only one image is timed
_LARGE = 256  # px a side, beyond which smaller images are suggested
_SMALLER = 224
_WORTH = 0.1  # parts with a smaller share of the time are not listed


@dataclass(frozen=True)
class Part:
    """One part of a run. forwards: images of forward passes; backwards: images of forward and backward passes;
    shorter: what the user may type to shorten or leave out this part."""

    name: str
    forwards: float | int = 0
    backwards: float | int = 0
    shorter: str = ""


def train_parts(images: int, tested: int, *, epochs: int, evaluations: int, frozen: bool = False) -> tuple[Part, ...]:
    """Passes over the training images, and evaluations on the test images; frozen: one pass an image."""
    if frozen:
        return (Part("features, once", images + tested),)
    return (Part("training", tested * evaluations, images * epochs, "a smaller --epochs"),)


@dataclass(frozen=True)
class Pace:
    """Seconds an image: of a forward pass, and of a forward and a backward pass together."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Load:
    """The parts of a run for one model, and the model's pace."""

    pace: Pace
    parts: tuple[Part, ...]


def seconds_of(loads: Sequence[Load], *, processes: int = 1) -> dict[Part, float]:
    """Seconds of each part summed over models, divided by the number of processes; parts of one name are added up."""
    by_name: dict[str, tuple[Part, float]] = {}
    for load in loads:
        for part in load.parts:
            spent = (part.forwards * load.pace.forward + part.backwards * load.pace.backward) / processes
            first, before = by_name.get(part.name, (part, 0.0))
            by_name[part.name] = (first, before + spent)
    return dict(by_name.values())


def advice(seconds: dict[Part, float], *, size: tuple[int, int] = (0, 0), patch: int | None = None) -> str | None:
    """The line printed before a run that is expected to take more than PATIENCE: its parts, and how to shorten it.

    size: of the model's input, px (height, width); patch: side of a ViT's patches, px, None for other models.
    """
    total = sum(seconds.values())
    if total <= PATIENCE:
        return None
    large = {part: spent for part, spent in seconds.items() if spent >= _WORTH * total}
    order = sorted(large, key=lambda part: -large[part])
    listed = ", ".join(f"{part.name} {in_time(large[part])}" for part in order)
    shorter = [f"{part.shorter} ({in_time(large[part])})" for part in order if part.shorter]
    shorter.append("--limit N takes fewer images")
    if max(size) > _LARGE and patch and _SMALLER % patch == 0:
        shorter.append(f"--image-size {_SMALLER} has {max(size) ** 2 / _SMALLER**2:.1f} times fewer patches")
    return f"this may take {in_time(total)} (one pass was timed): {listed}; to shorten it: {'; '.join(shorter)}"


def print_expected(
    works: Sequence[tuple[Model, Split, Sequence[Part]]], options: RunOptions, *, processes: int = 1
) -> None:
    """Print on stderr how long a run may take where that is more than PATIENCE; nothing with --quiet.

    Each model is timed on a few of its images. A pass that fails is ignored here: the run itself will report it.
    """
    if options.quiet:
        return
    loads = []
    for model, split, parts in works:
        if len(split) and sum(part.forwards + part.backwards for part in parts) > _TIMED:
            with suppress(RuntimeError):
                backward = any(part.backwards for part in parts)
                loads.append(Load(pace_of(model, split, backward=backward, options=options), tuple(parts)))
    if not loads:
        return
    largest = max((model for model, _, _ in works), key=lambda model: max(model.input_size))
    layout = largest.anatomy.layout
    patch = None if layout is None else largest.input_size[0] // layout.grid[0]
    line = advice(seconds_of(loads, processes=processes), size=largest.input_size, patch=patch)
    if line is not None:
        print(line, file=sys.stderr)  # noqa: T201


def pace_of(
    model: Model,
    split: Split,
    *,
    backward: bool,
    options: RunOptions,
    clock: Callable[[], float] = perf_counter,
) -> Pace:
    """Seconds an image, of one pass of up to 8 of a split's images; of one image where that alone is slow."""
    (batch,) = split.pick(torch.arange(min(_TIMED, len(split)))).batches(_TIMED, device=model.device)
    images = batch.images
    with autocast(model.device, options.precision):
        (first,) = passes(model, images[:1], 1, warm_up=0, clock=clock)
        if first > _SLOW:
            images = images[:1]
            forward = first
        else:
            forward = passes(model, images, 1, clock=clock)[0] / len(images)
        return Pace(forward, _backward(model, images, clock) / len(images) if backward else 0.0)


def _backward(model: Model, images: torch.Tensor, clock: Callable[[], float]) -> float:
    """Seconds of a forward pass and a backward pass to the pixels."""
    pixels = images.clone().requires_grad_()
    with evaluating(model), torch.enable_grad():
        begin = clock()
        (gradient,) = torch.autograd.grad(model(pixels).amax(-1).sum(), pixels)
        gradient.flatten()[0].item()  # waits until a GPU has finished
        return clock() - begin

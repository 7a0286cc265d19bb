"""The randomisation check (Adebayo 2018): a map of what a model has learnt must change when its weights are randomised.

Weights are randomised from the head down, one part after another, and the maps before and after compared by rank
correlation. A method whose maps hardly change depends on the image, not on the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.faithfulness.agreement import spearman
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps
from vitlens.uncertainty import Estimate, bootstrap_mean

Explain = Callable[[Model, Images, Labels], Maps]

UNCHANGED = 0.5  # mean rank correlation with all weights randomised, from which on a method is flagged
PARTS = 4  # into which the blocks are divided


@dataclass(frozen=True)
class WeightGroup:
    """A part of the weights: its name for a report, and the parameters that are in it."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Randomisation:
    """How alike maps are before and after: stages, from the head down, each with all before it; correlation: Spearman
    (stages, batch), 0 where a map after it is constant, NaN where the map of the model itself is."""

    stages: tuple[str, ...]
    correlation: Float[Tensor, "stages batch"]

    @property
    def last(self) -> Float[Tensor, " batch"]:
        """The correlation with all weights randomised, of the images whose own map is not constant."""
        final = self.correlation[-1]
        return final[~final.isnan()]

    def estimate(self, *, seed: int = 0) -> Estimate:
        """The mean correlation with all weights randomised, with its interval."""
        return bootstrap_mean(self.last.numpy(), seed=seed, unit="")

    @property
    def flagged(self) -> bool:
        """Whether the maps hardly change: their mean correlation is UNCHANGED or more; also where there is none."""
        return not len(self.last) or float(self.last.mean()) >= UNCHANGED


def randomisation(
    model: Model,
    images: Images,
    targets: Labels,
    explain: Explain,
    *,
    parts: int = PARTS,
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> Randomisation:
    """The maps of a method before and after the weights are randomised, part by part, for the same targets.

    parts: into which the blocks are divided (head and embedding are parts of their own). The model's weights are as
    they were when this returns or raises. Raises InputError where the method's maps of the model are not finite.
    """
    before = explain(model, images, targets)
    if not bool(before.isfinite().all()):
        raise InputError("expected finite maps to compare, found NaN or infinity")
    steps, rows = weight_groups(model, parts=parts), []
    constant = spearman(before, before).isnan()
    for count in range(1, len(steps) + 1):
        with randomised(model, steps[:count], seed=seed):
            after = explain(model, images, targets)
        rows.append(spearman(before, after.nan_to_num(0.0, 0.0, 0.0)).nan_to_num(0.0).masked_fill(constant, torch.nan))
        advance(len(images))
    return Randomisation(tuple(step.name for step in steps), torch.stack(rows))


def weight_groups(model: Model, *, parts: int = PARTS) -> tuple[WeightGroup, ...]:
    """The weights from the head down: what comes after the blocks, the blocks in parts, what comes before them.

    Read from the order in which the model holds its parameters. Raises InputError for a model without blocks.
    """
    blocks, names = model.anatomy.blocks, [name for name, _ in model.module.named_parameters()]
    members = {block: tuple(name for name in names if name.startswith(f"{block}.")) for block in blocks}
    places = [index for index, name in enumerate(names) if any(name in found for found in members.values())]
    if not places:
        raise InputError(f"expected a model of blocks to randomise from the head down, found none in {model.alias}")
    inside = {name for found in members.values() for name in found}
    head = tuple(name for name in names[places[-1] :] if name not in inside)
    rest = tuple(name for name in names if name not in inside and name not in head)
    sizes = torch.arange(len(blocks)).flip(0).tensor_split(min(parts, len(blocks)))
    found = [WeightGroup("head", head)]
    for group in sizes:
        numbers = group.tolist()
        title = f"blocks {numbers[-1]} to {numbers[0]}" if len(numbers) > 1 else f"block {numbers[0]}"
        found.append(WeightGroup(title, tuple(name for number in numbers for name in members[blocks[number]])))
    found.append(WeightGroup("embedding", rest))
    return tuple(stage for stage in found if stage.parameters)


@contextmanager
def randomised(model: Model, parts: Sequence[WeightGroup], *, seed: int = 0) -> Iterator[Model]:
    """The model with the weights of some parts randomised; they come back, bit by bit, on exit.

    Each tensor's numbers are shuffled among themselves: nothing learnt remains, and the scale of every layer does.
    """
    wanted = {name for part in parts for name in part.parameters}
    kept: dict[str, Tensor] = {}
    known = dict(model.module.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    try:
        for name, parameter in known.items():  # in the model's order, so that a weight's draw is its own
            order = torch.randperm(parameter.numel(), generator=generator)
            if name in wanted:
                kept[name] = parameter.detach().clone()
                shuffled = kept[name].flatten()[order.to(parameter.device)].view_as(parameter)
                _put(parameter, shuffled)
        yield model
    finally:
        for name, value in kept.items():
            _put(known[name], value)


@torch.no_grad()
def _put(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value)

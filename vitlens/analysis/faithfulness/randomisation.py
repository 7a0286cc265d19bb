"""The randomisation check (Adebayo 2018): maps that explain a model must change when its weights are randomised.

Weights are randomised cumulatively from the head down, and the maps before and after are compared by rank correlation.
A method whose maps hardly change depends on the image, not on the model; cascade.py has the rule.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.evaluation.intervals import estimates
from vitlens.analysis.faithfulness.agreement import spearman
from vitlens.analysis.faithfulness.cascade import (
    Cascade,
    RandomisedStage,
    hardly_changes,
    judged_cascade,
    middle_of,
)
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.lens.quick_passes import quick_passes
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps
from vitlens.uncertainty import Estimate, bootstrap_mean

Explain = Callable[[Model, Images, Labels], Maps]

PARTS = 4  # number of groups into which the blocks are divided


@dataclass(frozen=True)
class WeightGroup:
    """A group of weights: its name for a report, and the names of its parameters."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Randomisation:
    """The similarity of maps before and after. stages: from the head down, each including those before; correlation:
    Spearman's (stages, batch), 0 where the map after is constant, NaN where the map before is; kept: which images keep
    the prediction of the trained model, None where that was not asked."""

    stages: tuple[str, ...]
    correlation: Float[Tensor, "stages batch"]
    kept: Bool[Tensor, "stages batch"] | None = None

    @property
    def last(self) -> Float[Tensor, " batch"]:
        """The correlation with all weights randomised, of the images whose map before is not constant."""
        final = self.correlation[-1]
        return final[~final.isnan()]

    def estimate(self, *, seed: int = 0) -> Estimate:
        """The mean correlation with all weights randomised, with its interval."""
        return bootstrap_mean(self.last.numpy(), seed=seed, unit="")

    @property
    def areas(self) -> Float[Tensor, " batch"]:
        """The mean correlation over all stages, of the images whose map before is not constant: 1 for maps that never
        change, about 0 for maps that change with the head already. All stages count alike."""
        return self.correlation.mean(0)[~self.correlation[-1].isnan()]

    def whole(self, *, seed: int = 0) -> Estimate:
        """The mean correlation over the whole cascade, with its interval."""
        return bootstrap_mean(self.areas.numpy(), seed=seed, unit="")

    def cascade(self, *, seed: int = 0) -> Cascade:
        """The mean correlation of every stage with its interval, judged."""
        usable = ~self.correlation[-1].isnan()
        n = int(usable.sum())
        if not n:
            return judged_cascade([RandomisedStage(name, None) for name in self.stages], 0)
        means = estimates(self.correlation[:, usable], seed=seed, unit="")
        kept = [None] * len(means) if self.kept is None else self.kept.float().mean(1).tolist()
        stages = [
            RandomisedStage(name, mean.value, mean.low, mean.high, share)
            for name, mean, share in zip(self.stages, means, kept)
        ]
        return judged_cascade(stages, n)

    @property
    def flagged(self) -> bool:
        """Whether the maps hardly change, by their mean correlation over the cascade, or have none that is defined."""
        if not len(self.last):
            return True
        means = self.correlation.nanmean(1).tolist()
        stages = [RandomisedStage(name, mean) for name, mean in zip(self.stages, means)]
        return hardly_changes(stages, middle_of(self.stages))


def randomisation(
    model: Model,
    images: Images,
    targets: Labels,
    explain: Explain,
    *,
    parts: int = PARTS,
    seed: int = 0,
    kept: Bool[Tensor, "stages batch"] | None = None,
    before: Maps | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Randomisation:
    """Compare the maps of a method before and after the weights are randomised, stage by stage, for the same targets.

    parts: number of groups of blocks (head and embedding are groups of their own); kept: see `predictions_kept`, the
    same for every method; before: the method's maps of the trained model, where they are known. The model's weights are
    restored on return and after an exception. Raises InputError where the method's maps of the model are not finite.
    """
    if before is None:
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
    return Randomisation(tuple(step.name for step in steps), torch.stack(rows), kept)


def predictions_kept(
    model: Model, images: Images, *, parts: int = PARTS, seed: int = 0
) -> Bool[Tensor, "stages batch"]:
    """Which images keep their predicted class when the weights are randomised, by the stages of `randomisation`.

    A map can be expected to change only where the model does. The weights are restored on return and after an
    exception.
    """

    @torch.no_grad()
    def predicted() -> Labels:
        with evaluating(model), quick_passes(model):
            answers: Labels = model(images).argmax(-1).cpu()
        return answers

    steps, rows, before = weight_groups(model, parts=parts), [], predicted()
    for count in range(1, len(steps) + 1):
        with randomised(model, steps[:count], seed=seed):
            rows.append(predicted() == before)
    return torch.stack(rows)


def weight_groups(model: Model, *, parts: int = PARTS) -> tuple[WeightGroup, ...]:
    """The weights in groups from the head down: those after the blocks, the blocks in parts, those before the blocks.

    By the order of the model's parameters. Raises InputError for a model without blocks.
    """
    blocks, names = model.anatomy.blocks, [name for name, _ in model.module.named_parameters()]
    members = {block: tuple(name for name in names if name.startswith(f"{block}.")) for block in blocks}
    places = [index for index, name in enumerate(names) if any(name in of_block for of_block in members.values())]
    if not places:
        raise InputError(f"expected a model of blocks to randomise from the head down, found none in {model.alias}")
    inside = {name for of_block in members.values() for name in of_block}
    head = tuple(name for name in names[places[-1] :] if name not in inside)
    rest = tuple(name for name in names if name not in inside and name not in head)
    sizes = torch.arange(len(blocks)).flip(0).tensor_split(min(parts, len(blocks)))
    groups = [WeightGroup("head", head)]
    for group in sizes:
        numbers = group.tolist()
        title = f"blocks {numbers[-1]} to {numbers[0]}" if len(numbers) > 1 else f"block {numbers[0]}"
        groups.append(WeightGroup(title, tuple(name for number in numbers for name in members[blocks[number]])))
    groups.append(WeightGroup("embedding", rest))
    return tuple(stage for stage in groups if stage.parameters)


@contextmanager
def randomised(model: Model, parts: Sequence[WeightGroup], *, seed: int = 0) -> Iterator[Model]:
    """The model with the weights of these groups randomised; they are restored exactly on exit.

    The elements of each tensor are permuted, which keeps the scale of every layer.
    """
    chosen = {name for part in parts for name in part.parameters}
    originals: dict[str, Tensor] = {}
    known = dict(model.module.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    try:
        for (
            name,
            parameter,
        ) in known.items():  # in the model's order, so that a parameter's permutation does not depend on parts
            order = torch.randperm(parameter.numel(), generator=generator)
            if name in chosen:
                originals[name] = parameter.detach().clone()
                shuffled = originals[name].flatten()[order.to(parameter.device)].view_as(parameter)
                _put(parameter, shuffled)
        yield model
    finally:
        for name, value in originals.items():
            _put(known[name], value)


@torch.no_grad()
def _put(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value)

"""The randomisation check (Adebayo 2018): maps that explain a model must change when its weights are randomised.

Weights are randomised cumulatively from the head down, and the maps before and after are compared by rank correlation.
A method whose maps hardly change depends on the image, not on the model; checks.py has the rule.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.evaluation.intervals import estimates
from vitlens.analysis.faithfulness.checks import Judgement, Stage, judged_cascade
from vitlens.analysis.faithfulness.maps import Explain, PerImage, spearman
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.lens.quick_passes import quick_passes
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

PARTS = 4  # number of groups into which the blocks are divided


@dataclass(frozen=True)
class WeightGroup:
    """A group of weights: its name for a report, and the names of its parameters."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Randomisation:
    """The similarity of maps before and after. names: of the stages from the head down, each including those before;
    correlation: Spearman's (stages, batch), 0 where the map after is constant, NaN where the map before is; kept: which
    images keep the prediction of the trained model, None where that was not asked."""

    names: tuple[str, ...]
    correlation: Float[Tensor, "stages batch"]
    kept: Bool[Tensor, "stages batch"] | None = None

    @property
    def usable(self) -> Float[Tensor, "stages usable"]:
        """The correlation of the images whose map before is not constant."""
        return self.correlation[:, ~self.correlation[-1].isnan()]

    @property
    def values(self) -> dict[str, PerImage]:
        """Every number of an image that is usable, by its name in the league. randomisation: the correlation with all
        weights randomised; cascade: the mean over all stages, which count alike: 1 for maps that never change, about 0
        for maps that change with the head already."""
        return {"randomisation": self.usable[-1], "cascade": self.usable.mean(0)}

    def stages(self, *, seed: int = 0) -> list[Stage]:
        """The mean correlation of every stage with its interval, and the share of predictions that stay."""
        if not self.usable.shape[1]:
            return [Stage(name, None) for name in self.names]
        kept = [None] * len(self.names) if self.kept is None else self.kept.float().mean(1).tolist()
        return [Stage(*each) for each in zip(self.names, estimates(self.usable, seed=seed, unit=""), kept)]

    def judged(self, *, seed: int = 0) -> Judgement:
        """Whether the maps depend on the weights."""
        return judged_cascade(self.stages(seed=seed))


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
    groups, rows, constant = weight_groups(model, parts=parts), [], spearman(before, before).isnan()
    for count in range(1, len(groups) + 1):
        with randomised(model, groups[:count], seed=seed):
            after = explain(model, images, targets)
        rows.append(spearman(before, after.nan_to_num(0.0, 0.0, 0.0)).nan_to_num(0.0).masked_fill(constant, torch.nan))
    return Randomisation(tuple(group.name for group in groups), torch.stack(rows), kept)


def predictions_kept(
    model: Model, images: Images, *, parts: int = PARTS, seed: int = 0
) -> Bool[Tensor, "stages batch"]:
    """Which images keep their predicted class when the weights are randomised, by the stages of `randomisation`.

    A map can be expected to change only where the model does. The weights are restored on return and after an
    exception.
    """
    groups, predicted = weight_groups(model, parts=parts), []
    for count in range(len(groups) + 1):
        with torch.no_grad(), randomised(model, groups[:count], seed=seed), evaluating(model), quick_passes(model):
            predicted.append(model(images).argmax(-1).cpu())
    kept: Tensor = torch.stack(predicted[1:]) == predicted[0]
    return kept


def weight_groups(model: Model, *, parts: int = PARTS) -> tuple[WeightGroup, ...]:
    """The weights in groups from the head down: those after the blocks, the blocks in parts, those before the blocks.

    By the order of the model's parameters. Raises InputError for a model without blocks.
    """
    blocks, names = model.anatomy.blocks, [name for name, _ in model.module.named_parameters()]
    members = {block: tuple(name for name in names if name.startswith(f"{block}.")) for block in blocks}
    inside = {name for of_block in members.values() for name in of_block}
    if not inside:
        raise InputError(f"expected a model of blocks to randomise from the head down, found none in {model.alias}")
    last = max(index for index, name in enumerate(names) if name in inside)
    groups = [WeightGroup("head", tuple(name for name in names[last + 1 :]))]
    for group in torch.arange(len(blocks)).flip(0).tensor_split(min(parts, len(blocks))):
        numbers = group.tolist()
        title = f"blocks {numbers[-1]} to {numbers[0]}" if len(numbers) > 1 else f"block {numbers[0]}"
        groups.append(WeightGroup(title, tuple(name for number in numbers for name in members[blocks[number]])))
    groups.append(WeightGroup("embedding", tuple(name for name in names[:last] if name not in inside)))
    return tuple(group for group in groups if group.parameters)


@contextmanager
def randomised(model: Model, groups: Sequence[WeightGroup], *, seed: int = 0) -> Iterator[Model]:
    """The model with the weights of these groups randomised; they are restored exactly on exit.

    The elements of each tensor are permuted, which keeps the scale of every layer. Tensors are drawn in the model's
    order, so that a tensor's permutation does not depend on the groups.
    """
    chosen = {name for group in groups for name in group.parameters}
    known, originals = dict(model.module.named_parameters()), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for name, parameter in known.items():
                order = torch.randperm(parameter.numel(), generator=generator)
                if name in chosen:
                    originals[name] = parameter.detach().clone()
                    shuffled = originals[name].flatten()[order.to(parameter.device)]
                    parameter.copy_(shuffled.view_as(parameter))
        yield model
    finally:
        with torch.no_grad():
            for name, value in originals.items():
                known[name].copy_(value)

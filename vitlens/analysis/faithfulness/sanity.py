"""Two sanity checks: maps must change with the model's weights, and move with the image.

Randomisation (Adebayo 2018): weights are randomised cumulatively from the head down, and the maps
before and after are compared by rank correlation. A method with maps that hardly change depends on
the image, not on the model.

Stability: the map of an image shifted by at most a pixel, or flipped, is compared with the map of
the image, changed in the same way. For a method that follows the change exactly the two are equal,
also where a shift interpolates. checks.py has the rules.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.evaluation.intervals import estimates
from vitlens.analysis.faithfulness.checks import (
    DISTURBANCES,
    FAR,
    FLIP,
    Judgement,
    Stage,
    judged_cascade,
    judged_stability,
)
from vitlens.analysis.faithfulness.maps import AnyMaps, Explain, PerImage, map_faults, spearman
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.lens.quick_passes import quick_passes
from vitlens.lens.trace import probe_images
from vitlens.models.hooks import Arguments, watching
from vitlens.models.memo import holding, per_model
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps
from vitlens.uncertainty import Estimate

PARTS = 4  # number of groups into which the blocks are divided
OVERALL = "shifts"  # all shifts together
_IS_SHIFT = [name != FLIP for name in DISTURBANCES]  # only shifts are judged


@dataclass(frozen=True)
class Randomisation:
    """The similarity of maps before and after the randomisation of weights.

    names: the names of the stages from the head down. Each stage includes those before.
    correlation: Spearman's rank correlation of the maps before and after. It is 0 where the map
        after is constant, and NaN where the map before is constant.
    kept: True for images that keep the prediction of the trained model.
    """

    names: tuple[str, ...]
    correlation: Float[Tensor, "stages batch"]
    kept: Bool[Tensor, "stages batch"]

    @property
    def usable(self) -> Float[Tensor, "stages usable"]:
        """Return the correlation of images with a trained model's map that is not constant."""
        return self.correlation[:, self._is_usable]

    @property
    def _is_usable(self) -> Bool[Tensor, " batch"]:
        """Return True for images with a trained model's map that is not constant.

        Others have NaN at every stage, so any stage shows them.
        """
        return ~self.correlation[-1].isnan()

    @property
    def values(self) -> dict[str, PerImage]:
        """Return every number of a usable image, by its name in the league.

        randomisation: the correlation with all weights randomised.
        cascade: the mean over all stages, with equal weights. It is 1 for maps that never change,
            and about 0 for maps that already change with the head.
        """
        return {"randomisation": self.usable[-1], "cascade": self.usable.mean(0)}

    def groups_of_usable(self, groups: Tensor | None) -> Tensor | None:
        """Return the groups of the usable images.

        groups: the source of each image, of which the first ones are compared.
        """
        if groups is None:
            return None
        return groups[: len(self._is_usable)][self._is_usable]

    def stages(self, *, groups: Tensor | None = None, seed: int = 0) -> list[Stage]:
        """Return the mean correlation of every stage, and the share of predictions kept.

        groups (n,): the source of each image.
        """
        if not self.usable.shape[1]:
            return [Stage(name, similarity=None) for name in self.names]
        shares = self.kept.float().mean(1).tolist()
        groups = self.groups_of_usable(groups)
        means = estimates(self.usable, groups=groups, seed=seed, unit="", least=-1.0, most=1.0)
        stages = list[Stage]()
        for name, mean, share in zip(self.names, means, shares):
            stages.append(Stage(name, similarity=mean, kept=share))
        return stages

    def judged(self, *, groups: Tensor | None = None, seed: int = 0) -> Judgement:
        """Judge if the maps depend on the weights."""
        return judged_cascade(self.stages(groups=groups, seed=seed))


def randomisation(
    model: Model,
    images: Images,
    targets: Labels,
    explain: Explain,
    kept: Bool[Tensor, "stages batch"],
    *,
    before: Maps | None = None,
    seed: int = 0,
) -> Randomisation:
    """Compare the maps of a method before and after the weights are randomised, stage by stage.

    Targets stay the same.

    kept: the result of `predictions_kept`, which is the same for every method.
    before: the maps of the trained model; None computes them.

    The weights are restored on return and after an exception. Raises InputError if a map of the
    trained model is not finite.
    """
    if before is None:
        before = explain(model, images, targets)
    if not bool(before.isfinite().all()):
        raise InputError("expected finite maps to compare, found NaN or infinity")
    stages = cascade(model)
    correlations = list[PerImage]()
    is_constant = spearman(before, before).isnan()
    for names in stages.values():
        with randomised(model, names, seed=seed):
            after = explain(model, images, targets)
        # random weights may give maps that are not finite; a constant map has no correlation
        finite = after.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        correlation = spearman(before, finite).nan_to_num(0.0)
        correlations.append(correlation.masked_fill(is_constant, torch.nan))
    return Randomisation(names=tuple(stages), correlation=torch.stack(correlations), kept=kept)


@torch.no_grad()
def predictions_kept(
    model: Model, images: Images, *, seed: int = 0
) -> Bool[Tensor, "stages batch"]:
    """Return True for images that keep their predicted class, at each stage of `randomisation`.

    A map can be expected to change only where the model does. A model with a single class has no
    prediction to keep.
    """
    trained = _predict_randomised(model, images, (), seed)
    stages = list[Tensor]()
    for names in cascade(model).values():
        stages.append(_predict_randomised(model, images, names, seed))
    is_kept: Tensor = torch.stack(stages) == trained
    return is_kept & (len(model.classes) != 1)


def _predict_randomised(
    model: Model, images: Images, names: Collection[str], seed: int
) -> Int[Tensor, " batch"]:
    """Return the predicted classes if these parameters are randomised, on the CPU."""
    with randomised(model, names, seed=seed), evaluating(model), quick_passes(model):
        predictions: Tensor = model(images).argmax(-1).cpu()
    return predictions


def cascade(model: Model) -> dict[str, tuple[str, ...]]:
    """Return the parameters that are randomised at each stage, by the title of the stage.

    The stages go from the head down: the parameters after the blocks, the blocks in PARTS groups,
    and the parameters before the blocks. Each stage includes those before it. A parameter outside
    the blocks counts where a forward pass uses it last: after the last block, before the first, or
    with the block that follows.

    Raises InputError for a model without blocks.
    """
    blocks = model.anatomy.blocks
    names = [name for name, _ in model.module.named_parameters()]
    parameters_of_block = dict[str, list[str]]()
    inside = set[str]()
    for block in blocks:
        parameters_of_block[block] = [name for name in names if name.startswith(f"{block}.")]
        inside.update(parameters_of_block[block])
    if not inside:
        raise InputError(
            "expected a model of blocks to randomise from the head down, found none in "
            f"{model.alias}"
        )
    block_counts = blocks_before(model)
    head = list[str]()
    embedding = list[str]()
    for name in names:
        if name in inside:
            continue
        blocks_run = block_counts.get(name, 0)  # a parameter that is not used counts as embedding
        if blocks_run == len(blocks):
            head.append(name)
        elif blocks_run > 0:
            following_block = blocks[blocks_run]
            parameters_of_block[following_block].append(name)
        else:
            embedding.append(name)
    parameters_of_stage = {"head": tuple(head)}
    # from the last block down, in groups of nearly equal size: the numbers of a group fall
    parts = min(PARTS, len(blocks))
    for numbers in torch.arange(len(blocks)).flip(0).tensor_split(parts):
        low = int(numbers[-1])
        high = int(numbers[0])
        title = f"blocks {low} to {high}" if len(numbers) > 1 else f"block {low}"
        group = list[str]()
        for block in blocks[low : high + 1]:
            group += parameters_of_block[block]
        parameters_of_stage[title] = tuple(group)
    parameters_of_stage["embedding"] = tuple(embedding)
    # each stage includes those before it; a stage without parameters is left out
    stages = dict[str, tuple[str, ...]]()
    cumulative = tuple[str, ...]()
    for title, parameters in parameters_of_stage.items():
        cumulative += parameters
        if parameters:
            stages[title] = cumulative
    return stages


@per_model
def blocks_before(model: Model) -> dict[str, int]:
    """Return the number of blocks that have run when a forward pass last uses each parameter.

    The numbers are by the name of the parameter. Parameters that are not used are left out.
    """
    numbers = {block: number for number, block in enumerate(model.anatomy.blocks)}
    uses = _ParameterUses(model)

    def count_block(name: str, _values: Arguments, _output: Any) -> None:
        """Count a block that has run; called after each block."""
        uses.blocks_run = max(uses.blocks_run, numbers[name] + 1)

    with evaluating(model), torch.no_grad(), watching(model.module, numbers, count_block), uses:
        model(probe_images(model, 1))
    return uses.blocks_before


class _ParameterUses(TorchFunctionMode):
    """Notes the parameters that functions of torch take, while it is entered as a context.

    blocks_run: the number of blocks that have run so far.
    blocks_before: that number at the last use of each parameter, by the parameter's name.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.blocks_run = 0
        self.blocks_before: dict[str, int] = {}
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the parameters among the arguments, and compute the call. torch calls this."""
        kwargs = kwargs or {}
        for argument in (*args, *kwargs.values()):
            values = argument if isinstance(argument, list | tuple) else (argument,)
            for value in values:
                name = self._names.get(id(value))
                if name is not None:
                    self.blocks_before[name] = self.blocks_run
        return func(*args, **kwargs)


@contextmanager
def randomised(model: Model, names: Collection[str], *, seed: int = 0) -> Iterator[Model]:
    """Yield the model with these parameters randomised; they are restored exactly on exit.

    The elements of each tensor are permuted, which keeps the scale of every layer. Tensors are
    drawn in the order of the model, so that the permutation of a tensor does not depend on which
    others are randomised. The structure read from the model stays that of its trained weights.
    """
    parameters = dict(model.module.named_parameters())
    originals = dict[str, Tensor]()
    generator = torch.Generator().manual_seed(seed)
    with holding(model):
        try:
            for name, parameter in parameters.items():
                order = torch.randperm(parameter.numel(), generator=generator)
                if name not in names:
                    continue
                originals[name] = parameter.data
                permuted = parameter.data.flatten()[order.to(parameter.device)]
                # empty_like keeps the order of the axes in memory
                values = torch.empty_like(parameter.data)
                parameter.data = values.copy_(permuted.view_as(parameter))
            yield model
        finally:
            for name, value in originals.items():
                parameters[name].data = value


class StabilityMeans(NamedTuple):
    """The stability of maps under one disturbance, or OVERALL; None without a usable map.

    correlation: the mean rank correlation of `Stability`.
    jumped: the share of images whose map jumps.
    """

    disturbance: str
    correlation: Estimate | None
    jumped: Estimate | None


@dataclass(frozen=True)
class Stability:
    """The maps under every disturbance, in the order of DISTURBANCES.

    correlation: Spearman's rank correlation of the map of the changed image with the map that is
        changed in the same way. It is NaN where either is constant or not finite.
    jumped: True if the highest point lies further than FAR from its place. It is False where the
        correlation is NaN.
    """

    correlation: Float[Tensor, "disturbances batch"]
    jumped: Bool[Tensor, "disturbances batch"]

    def rows(self, *, groups: Tensor | None = None, seed: int = 0) -> list[StabilityMeans]:
        """Return the means over all shifts, then those under each disturbance.

        Over all shifts, an image jumps if it jumps under any of them. Only images with usable maps
        under all disturbances count. Without any, only the first means are returned, with None.

        groups (n,): the source of each image.
        """
        usable = ~self.correlation.isnan().any(0)
        if not usable.any():
            return [StabilityMeans(OVERALL, None, None)]
        correlation = self.correlation[:, usable]
        jumped = self.jumped[:, usable]
        if groups is not None:
            groups = groups[: len(usable)][usable]  # the first images are compared
        overall = correlation[_IS_SHIFT].mean(0, keepdim=True)
        correlations = torch.cat([overall, correlation])
        means = estimates(correlations, groups=groups, seed=seed, unit="", least=-1.0, most=1.0)
        jumped_under_any = jumped[_IS_SHIFT].any(0)
        shares = [accuracy(row, groups=groups) for row in (jumped_under_any, *jumped)]
        names = (OVERALL, *DISTURBANCES)
        return [StabilityMeans(*values) for values in zip(names, means, shares)]

    def judged(self, *, groups: Tensor | None = None, seed: int = 0) -> Judgement:
        """Judge if the maps jump."""
        overall = self.rows(groups=groups, seed=seed)[0]
        return judged_stability(overall.correlation, overall.jumped)


def stability(
    model: Model, images: Images, targets: Labels, explain: Explain, *, maps: AnyMaps | None = None
) -> Stability:
    """Compare the maps of a method under each disturbance of the images, for the same targets.

    A map that is constant or not finite is not compared.

    maps: the maps of the unchanged images; None computes them.

    Raises InputError for a method that gives maps of another size for a disturbed image.
    """
    correlations = list[Tensor]()
    jumps = list[Tensor]()
    height, width = images.shape[-2:]
    with evaluating(model):
        if maps is None:
            maps = explain(model, images, targets)
        maps = maps.cpu()
        rows, columns = maps.shape[-2:]
        for name, shift in DISTURBANCES.items():
            actual = explain(model, disturb_images(images, name), targets).cpu()
            if actual.shape != maps.shape:
                raise InputError(
                    f"expected maps of shape {tuple(maps.shape)}, found {tuple(actual.shape)}"
                )
            # px of the map for `shift` px of the image
            down = shift * rows / height
            right = shift * columns / width
            expected = shift_values(maps.float().unsqueeze(1), down, right).squeeze(1)
            if name == FLIP:
                expected = expected.flip(-1)
            is_sound = map_faults(expected).sound & map_faults(actual).sound
            # ranks and maxima need finite values
            expected = torch.where(is_sound[:, None, None], expected.float(), 0.0)
            actual = torch.where(is_sound[:, None, None], actual.float(), 0.0)
            correlation = spearman(expected, actual).masked_fill(~is_sound, torch.nan)
            distance = (_top_place(expected) - _top_place(actual)).abs().amax(1)
            correlations.append(correlation)
            jumps.append((distance > FAR) & ~correlation.isnan())
    return Stability(torch.stack(correlations), torch.stack(jumps))


def _top_place(maps: AnyMaps) -> Float[Tensor, "batch 2"]:
    """Return the row and column of the highest value of each map, as shares of the sides."""
    rows, columns = maps.shape[-2:]
    index = maps.flatten(1).argmax(1)
    row = index // columns
    column = index % columns
    return torch.stack((row / rows, column / columns), 1)


def disturb_images(images: Images, name: str) -> Images:
    """Return the images under one of DISTURBANCES, with their edges repeated."""
    shift = DISTURBANCES[name]
    moved = shift_values(images, down=shift, right=shift)
    return moved.flip(-1) if name == FLIP else moved


def shift_values(
    values: Float[Tensor, "batch channels height width"], down: float, right: float
) -> Float[Tensor, "batch channels height width"]:
    """Return values moved by numbers of pixels, which may be fractions.

    Values are linear between the pixels, and the edge is repeated.
    """
    for axis, amount in ((2, down), (3, right)):
        if not amount:
            continue
        # the old place, between two pixels, that each new pixel is read from
        places = torch.arange(values.shape[axis], dtype=torch.float64) - amount
        low = places.floor()
        last = values.shape[axis] - 1
        share = (places - low).to(values)  # of the pixel above; the rest is of that below
        if axis == 2:
            share = share.unsqueeze(1)  # the same for all columns of a row
        indices_below = low.long().clamp(0, last).to(values.device)
        indices_above = (low + 1).long().clamp(0, last).to(values.device)
        below = values.index_select(axis, indices_below)
        above = values.index_select(axis, indices_above)
        values = below + share * (above - below)
    return values

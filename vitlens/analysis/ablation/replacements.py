"""Replacements of a head's or an MLP's output: its mean over images, or its output for another image."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.analysis.ablation.effects import Unit
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.capture import watching_mlps
from vitlens.lens.interventions import Intervention
from vitlens.lens.layers import Layer, layer_of, layers
from vitlens.lens.replay import DEFAULT_BUDGET, Replay, replaying
from vitlens.models.model import Model
from vitlens.names import FEWEST_FOR_MEAN, REPLACEMENTS, Replacement
from vitlens.shapes import Heads, Images, Tokens

Replacements = dict[Intervention, Tensor]
Batches = Iterable[Float[Tensor, "_ 3 height width"]]  # of any sizes


class MeanOutputs:
    """Running means of every head's and MLP's output over images at each token; memory does not grow with the images.

    images: the number of images added.
    """

    def __init__(self) -> None:
        self.images = 0
        self._sums: dict[tuple[str, int], Tensor] = {}  # float64: heads (heads, tokens, head_dim), mlp (tokens, dim)

    def add(self, replay: Replay, images: int) -> None:
        """Add the clean pass of a batch of this many images."""
        for layer in layers(replay.model):
            if layer.head_dim:
                self._take("head", layer.index, replay.head_mean(layer.index) * images)
            if layer.mlp is not None:
                self._take("mlp", layer.index, replay.mlp_mean(layer.index) * images)
        self.images += images

    def add_heads(self, outputs: Mapping[int, Heads], images: int) -> None:
        """Add the outputs of heads, by layer, for a batch of this many images."""
        for layer, heads in outputs.items():
            self._take("head", layer, heads.sum(0))
        self.images += images

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up what several processes took in; total: the sum of a tensor over all of them."""
        self.images = round(float(total(torch.tensor([self.images], dtype=torch.float64))))
        self._sums = {key: total(self._sums[key]) for key in sorted(self._sums)}

    def replacements(self, units: Iterable[Unit]) -> Replacements:
        """The mean outputs that replace these units. Raises InputError before the first image."""
        tensors = {}
        for unit in units:
            if unit.kind == "block":
                continue
            if (unit.kind, unit.layer) not in self._sums:
                raise InputError(f"expected the mean of {unit.name} over images, found none; add images of this model")
            mean = (self._sums[unit.kind, unit.layer] / self.images).float()
            tensors[unit.intervention("mean")] = mean if unit.head is None else mean[unit.head]
        return tensors

    def _take(self, kind: str, layer: int, total: Tensor) -> None:
        exact = total.detach().cpu().double()
        self._sums[kind, layer] = self._sums[kind, layer] + exact if (kind, layer) in self._sums else exact


def means_of(model: Model, batches: Batches) -> MeanOutputs:
    """The means over all images of the batches, from clean passes that store nothing else."""
    means = MeanOutputs()
    for images in batches:
        with replaying(model, images, budget=0) as replay:
            means.add(replay, len(images))
    return means


def other_images(count: int, *, seed: int) -> Int[Tensor, " batch"]:
    """For each of `count` images the index of another one, each used once: a seeded cycle through all of them.

    Raises InputError for fewer than two.
    """
    if count < 2:
        raise InputError(f"expected at least 2 images to resample from, found {count}; try --replace zero")
    cycle = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    others = torch.empty_like(cycle)
    others[cycle] = cycle.roll(-1)
    return others


def replacement_for(images: int, requested: Replacement | None) -> Replacement:
    """The replacement for this many images; requested: None is the mean, or for few images resampling or zero.

    The mean over few images is close to each image's own output, so removing a unit would seem to have no effect: with
    fewer than FEWEST_FOR_MEAN images the default is resampling, with a single image zero. Raises InputError for "mean"
    or "resample" on too few images.
    """
    fallback: Replacement = "resample" if images > 1 else "zero"
    if requested is None:
        return "mean" if images >= FEWEST_FOR_MEAN else fallback
    if requested == "mean" and images < FEWEST_FOR_MEAN:
        raise InputError(
            f"expected at least {FEWEST_FOR_MEAN} images to replace by their mean, found {images}; give more, or "
            f"--replace {fallback}"
        )
    if requested == "resample" and images < 2:
        other_images(images, seed=0)  # raises
    return requested


def replacement_note(images: int, replace: Replacement) -> str:
    """The remark for a report where the default replacement was not the mean."""
    by = "another image's output" if replace == "resample" else "zero, which overstates what they do"
    many = f"{images} images are" if images != 1 else "1 image is"
    return f"{many} too few for a mean over the data (at least {FEWEST_FOR_MEAN}), so units are replaced by {by}"


@dataclass(frozen=True)
class Prepared:
    """A clean pass of a batch, and the tensors that replace removed units' outputs.

    replay: of the images; replacements: of given units; donor: the replay of the images that units are resampled from.
    """

    replay: Replay
    replacements: Callable[[Collection[Unit]], Replacements]
    donor: Replay | None = None

    @property
    def cost(self) -> int:
        """Multiply-adds of linear layers spent so far, including those on the donors."""
        return self.replay.cost + (0 if self.donor is None else self.donor.cost)

    @property
    def forward_equivalents(self) -> float:
        """The cost in full forward passes of the batch."""
        return self.cost / self.replay.forward_cost


@contextmanager
def prepared(
    model: Model,
    images: Images,
    units: Collection[Unit],
    *,
    replace: Replacement,
    means: MeanOutputs | None = None,
    donors: Images | None = None,
    seed: int = 0,
    budget: int = DEFAULT_BUDGET,
) -> Iterator[Prepared]:
    """A batch ready for the removal of any of the units. means, donors, seed: as for measure_effects."""
    if replace not in REPLACEMENTS:
        raise UnknownNameError("replacement", replace, REPLACEMENTS)
    if replace != "resample":
        with replaying(model, images, budget=budget) as replay:
            own = means if means is not None or replace == "zero" else MeanOutputs()
            if own is not None and own is not means:
                own.add(replay, len(images))
            yield Prepared(replay, lambda units: {} if replace == "zero" or own is None else own.replacements(units))
        return
    if donors is not None and len(donors) != len(images):
        raise InputError(f"expected another image for each of {len(images)} images, found {len(donors)}")
    order = other_images(len(images), seed=seed) if donors is None else torch.arange(len(images))
    watched = [_with_mlp(model, unit.layer) for unit in units if unit.kind == "mlp"]
    with ExitStack() as stack:
        with watching_mlps(model, watched) as outputs:
            source = stack.enter_context(replaying(model, images if donors is None else donors, budget=budget))
        replay = source if donors is None else stack.enter_context(replaying(model, images, budget=budget))
        rows = order.to(images.device)
        yield Prepared(
            replay, lambda units: _resampled(source, units, rows, outputs), None if donors is None else source
        )


def _with_mlp(model: Model, index: int) -> Layer:
    layer = layer_of(model, index)
    if layer.mlp is None:
        raise InputError(f"expected a layer with an MLP in {model.alias}, found none at layer {index}")
    return layer


def _resampled(source: Replay, units: Iterable[Unit], rows: Tensor, outputs: dict[int, Tokens]) -> Replacements:
    heads: dict[int, Tensor] = {}
    tensors: Replacements = {}
    for unit in units:
        if unit.kind == "mlp":
            tensors[unit.intervention("resample")] = outputs[unit.layer][rows]
        if unit.head is not None:
            if unit.layer not in heads:
                heads[unit.layer] = source.head_output(unit.layer)[rows]
            tensors[unit.intervention("resample")] = heads[unit.layer][:, unit.head]
    return tensors

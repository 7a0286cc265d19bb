"""Interactions between heads: the effect of removing two at once, and the similarity of the outputs of two heads.

Similarity is linear CKA, exact over any number of images; see vitlens/analysis/features/cka.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench, Outcomes, Some
from vitlens.analysis.ablation.importance import MeanChange, mean_changes
from vitlens.analysis.ablation.units import Unit, units_of
from vitlens.analysis.features.cka import CKAStream
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.capture import capture
from vitlens.lens.places import accesses
from vitlens.lens.trace import Layer, layers
from vitlens.models.model import Model
from vitlens.shapes import Images

_ROWS = 4096  # samples at once

Similar = Float[Tensor, "heads others"]


@dataclass(frozen=True)
class Synergy:
    """Effect of both minus the sum of the effects, change of loss in nats, for each pair.

    Positive: one compensates for the removal of the other (removing both costs more than the sum); negative: they
    depend on each other (once one is removed, removing the other costs less).

    units: the k units; pairs: (first, second) as indices of units; change: mean, low, high, p, p_holm (pairs,); both
    (pairs,), alone (units,): mean effect of removing both, or each; n: images; note: what a report must say, or "".
    """

    units: tuple[Unit, ...]
    pairs: tuple[tuple[int, int], ...]
    change: MeanChange
    both: Float[Tensor, " pairs"]
    alone: Float[Tensor, " units"]
    n: int
    note: str = ""

    def matrix(self) -> Float[Tensor, "units others"]:
        """The synergies as a symmetric matrix, NaN on its diagonal."""
        table = torch.full((len(self.units), len(self.units)), torch.nan, dtype=torch.float64)
        for (first, second), value in zip(self.pairs, self.change.mean):
            table[first, second] = table[second, first] = value
        return table


def pairwise(
    bench: Bench,
    units: Sequence[Unit],
    *,
    pairs: Sequence[tuple[int, int]] | None = None,
    images: Some | None = None,
    what: str = "Removing pairs",
) -> Synergy:
    """The synergy of each pair of units, from removing each of them and each pair; pairs: as indices of units (None:
    all of them); images: some of the bench's (None: all)."""
    if len(units) < 2 or len(set(units)) < len(units):
        raise InputError(f"expected at least 2 different units to pair, found {[unit.name for unit in units]}")
    chosen = tuple(combinations(range(len(units)), 2)) if pairs is None else tuple(pairs)
    sets = [*((unit,) for unit in units), *((units[first], units[second]) for first, second in chosen)]
    outcomes = bench.without(sets, images, what=what)
    groups = bench.groups if bench.groups is None or images is None else bench.groups[images]
    return synergy(units, chosen, outcomes, groups=groups, seed=bench.seed)


def synergy(
    units: Sequence[Unit],
    pairs: Sequence[tuple[int, int]],
    outcomes: Outcomes,
    *,
    groups: Tensor | None = None,
    seed: int = 0,
) -> Synergy:
    """Interval and test of each pair's synergy, paired over images (or groups), Holm over the pairs; outcomes: without
    each of the units, then without each of the pairs."""
    effect, count = outcomes.delta_loss, len(units)
    first, second = (list(each) for each in zip(*pairs))
    both = effect[count:]
    beyond = both - effect[first] - effect[second]
    (change,) = mean_changes((beyond,), families=[0] * len(beyond), groups=groups, seed=seed)
    warning = (
        "" if change.low.isfinite().all() else "no intervals and no tests: they need at least 2 images (or groups)"
    )
    note = "; ".join(filter(None, (outcomes.note, warning)))
    return Synergy(tuple(units), tuple(pairs), change, both.mean(1), effect[:count].mean(1), len(outcomes), note)


@dataclass(frozen=True)
class Redundancy:
    """Linear CKA of heads' outputs over tokens and images: 1 on the diagonal, NaN where the tokens differ.

    units: the heads, of rows and columns; matrix: unbiased, so that it is near 0, also below, for unlike heads; images:
    how many.
    """

    units: tuple[Unit, ...]
    matrix: Similar
    images: int


class RedundancyStream:
    """Accumulates batches and computes the similarity of all heads; memory does not grow with the number of images.

    Heads are compared where their layers have the same token sequence; the windows of Swin are compared within a layer.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.images = model, 0
        self._parts: dict[tuple[int, ...], tuple[list[Layer], CKAStream]] = {}
        for layer in layers(model):
            if f"blocks.{layer.index}.heads" in accesses(model):
                alike = (layer.queries,) if layer.windows == 1 else (layer.queries, layer.windows, layer.index)
                self._parts.setdefault(alike, ([], CKAStream(centred=False)))[0].append(layer)
        if not self._parts:
            raise UnsupportedError(f"expected heads that an output projection reads, found none in {model.alias}")

    def add(self, images: Images) -> None:
        """Add the heads' outputs for a batch, from a clean pass."""
        names = [f"blocks.{layer.index}.heads" for group, _ in self._parts.values() for layer in group]
        captured = capture(self.model, images, names)
        for group, heads in self._parts.values():
            step = max(1, _ROWS // (group[0].queries * group[0].windows))
            outputs = [_exact(captured[f"blocks.{layer.index}.heads"]) for layer in group]
            for start in range(0, len(images), step):
                some = [each[start : start + step].movedim(-3, 0).flatten(1, -2) for each in outputs]
                heads.add([head for layer in some for head in layer])
        self.images += len(images)

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up what several processes took in; total: the sum of a tensor over all of them."""
        self.images = round(float(total(torch.tensor([self.images], dtype=torch.float64))))
        for _, heads in self._parts.values():
            heads.join(total)

    def result(self) -> Redundancy:
        """The similarity so far. Raises InputError for fewer than four tokens."""
        units = units_of(self.model, kinds=("head",))
        place = {unit: index for index, unit in enumerate(units)}
        matrix = torch.full((len(units), len(units)), torch.nan, dtype=torch.float64)
        for group, heads in self._parts.values():
            own = torch.tensor([place[Unit("head", layer.index, at)] for layer in group for at in range(layer.heads)])
            matrix[own[:, None], own] = heads.cka()
        return Redundancy(units, matrix, self.images)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.cpu() if tensor.device.type == "mps" else tensor  # mps has no float64

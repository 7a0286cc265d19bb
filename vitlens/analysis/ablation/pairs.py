"""Interactions between heads: the effect of removing two at once, and the similarity of the outputs of two heads.

Similarity is linear CKA, exact over any number of images: unbiased HSIC (Song 2012; Nguyen 2021) of linear kernels,
K = X Xᵀ without its diagonal, needs only sums over the samples: Σ x yᵀ, Σ x, Σ |x|², Σ x |y|², Σ |x|² |y|². They are
accumulated for all heads, and CKA is computed from them at the end: it is not a mean over batches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench, Outcomes, Some
from vitlens.analysis.ablation.importance import MeanChange, mean_changes
from vitlens.analysis.ablation.units import Unit, units_of
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.capture import capture
from vitlens.lens.layers import Layer, layers
from vitlens.lens.places import accesses
from vitlens.models.model import Model
from vitlens.shapes import Images

_ROWS = 4096  # samples at once
_FEWEST = 4  # samples: unbiased HSIC divides by n (n - 3)

Similar = Float[Tensor, "heads others"]
Samples = Float[Tensor, "samples _ _"]


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


class CrossMoments:
    """Sums over samples of heads' outputs, float64, from which the linear CKA of each pair of heads is computed.

    Memory: (all heads x head_dim)² numbers of 8 bytes, 42 MB for DeiT-tiny, 680 MB for ViT-B.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, samples: Sequence[Samples]) -> None:
        """Add samples of each layer, the same samples in all layers."""
        exact = [each.double() for each in samples]
        wide = torch.cat([each.flatten(1) for each in exact], 1)  # (samples, all heads x head_dim)
        square = torch.cat([each.square().sum(2) for each in exact], 1)  # (samples, all heads)
        cross = wide.new_zeros(wide.shape[1], wide.shape[1])
        start = 0
        for each in exact:  # only above the diagonal
            stop = start + each[0].numel()
            cross[start:stop, start:] = wide[:, start:stop].T @ wide[:, start:]
            start = stop
        for name, value in {
            "cross": cross,
            "sum": wide.sum(0),
            "square": square.sum(0),
            "weighted": wide.T @ square,
            "squares": square.T @ square,
        }.items():
            self._sums[name] = self._sums[name].add_(value) if name in self._sums else value
        self.count += len(wide)

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up what several processes took in; total: the sum of a tensor over all of them."""
        self.count = round(float(total(torch.tensor([self.count], dtype=torch.float64))))
        self._sums = {name: total(self._sums[name]) for name in sorted(self._sums)}

    def cka(self, widths: Sequence[int]) -> Similar:
        """The CKA of each pair of heads; widths: the head_dim of each head, in their order.

        Raises InputError for fewer than four samples.
        """
        if self.count < _FEWEST:
            raise InputError(f"expected at least {_FEWEST} tokens to compare heads on, found {self.count}")
        heads = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))
        hsic = self._hsic(torch.nn.functional.one_hot(heads, len(widths)).double().T)  # (heads, all columns)
        scale = hsic.diagonal().clamp_min(0).sqrt()
        cka = hsic / (scale[:, None] * scale)  # NaN for a head that is constant
        return cka.where(torch.isfinite(cka), torch.nan)

    def _hsic(self, member: Float[Tensor, "heads columns"]) -> Similar:
        """Unbiased HSIC of each pair of heads, times n (n - 3)."""
        n = self.count
        cross, total, square, weighted, squares = (
            self._sums[name].cpu() for name in ("cross", "sum", "square", "weighted", "squares")
        )
        products = member @ cross.square() @ member.T - squares  # tr K L, i ≠ j; only above the diagonal
        ones = member @ total.square() - square  # 1ᵀ K 1
        own = member * total  # each head's part of the sum, in its columns
        both = own @ cross @ own.T  # Σ (x·s_x) (y·s_y)
        mixed = own @ weighted  # Σ (x·s_x) |y|²
        rows = both - mixed - mixed.T + squares  # 1ᵀ K L 1
        hsic = products + torch.outer(ones, ones) / ((n - 1) * (n - 2)) - 2 / (n - 2) * rows
        return hsic.triu() + hsic.triu(1).T


class RedundancyStream:
    """Accumulates batches and computes the similarity of all heads; memory does not grow with the number of images.

    Heads are compared where their layers have the same token sequence; the windows of Swin are compared within a layer.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.images = model, 0
        self._parts: dict[tuple[int, ...], tuple[list[Layer], CrossMoments]] = {}
        for layer in layers(model):
            if f"blocks.{layer.index}.heads" in accesses(model):
                alike = (layer.queries,) if layer.windows == 1 else (layer.queries, layer.windows, layer.index)
                self._parts.setdefault(alike, ([], CrossMoments()))[0].append(layer)
        if not self._parts:
            raise UnsupportedError(f"expected heads that an output projection reads, found none in {model.alias}")

    def add(self, images: Images) -> None:
        """Add the heads' outputs for a batch, from a clean pass."""
        names = [f"blocks.{layer.index}.heads" for group, _ in self._parts.values() for layer in group]
        captured = capture(self.model, images, names)
        for group, moments in self._parts.values():
            step = max(1, _ROWS // (group[0].queries * group[0].windows))
            outputs = [_exact(captured[f"blocks.{layer.index}.heads"]) for layer in group]
            for start in range(0, len(images), step):
                moments.add([each[start : start + step].transpose(-3, -2).flatten(0, -3) for each in outputs])
        self.images += len(images)

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up what several processes took in; total: the sum of a tensor over all of them."""
        self.images = round(float(total(torch.tensor([self.images], dtype=torch.float64))))
        for _, moments in self._parts.values():
            moments.join(total)

    def result(self) -> Redundancy:
        """The similarity so far. Raises InputError for fewer than four tokens."""
        units = units_of(self.model, kinds=("head",))
        place = {unit: index for index, unit in enumerate(units)}
        matrix = torch.full((len(units), len(units)), torch.nan, dtype=torch.float64)
        for group, moments in self._parts.values():
            widths = [layer.head_dim for layer in group for _ in range(layer.heads)]
            heads = [Unit("head", layer.index, head) for layer in group for head in range(layer.heads)]
            own = torch.tensor([place[unit] for unit in heads])
            matrix[own[:, None], own] = moments.cka(widths)
        return Redundancy(units, matrix, self.images)


def redundancy(model: Model, batches: Iterable[Images]) -> Redundancy:
    """The similarity of each pair of heads' outputs over all tokens of all images."""
    stream = RedundancyStream(model)
    for images in batches:
        stream.add(images)
    return stream.result()


def _exact(tensor: Tensor) -> Tensor:
    return tensor.cpu() if tensor.device.type == "mps" else tensor  # mps has no float64

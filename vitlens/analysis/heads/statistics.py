"""Numbers that say how every head looks, streamed over any number of images.

Definitions: distance (Dosovitskiy 2021, appendix D.8; Raghu 2021), Hoyer's sparsity (Hoyer 2004), sinks (keys that
receive more than the median + 5 median absolute deviations). Every number is a mean over the queries of an image, then
over images; nothing of N x N is kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.answers.moments import Key, Moments
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.analysis.heads.measure import Measured, measure
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.layers import probe_images
from vitlens.lens.observe import survey
from vitlens.lens.site import Site
from vitlens.models.model import Model
from vitlens.models.support import require
from vitlens.pixels import takes_images
from vitlens.shapes import Images

PerHead = Float[Tensor, "layers heads"]


@dataclass(frozen=True)
class Statistic:
    """title: as a figure names it; unit: "px", "nats", "fraction", "keys" ...; says: what it is, in a sentence."""

    title: str
    unit: str
    says: str


_ROWS: Final = {
    "entropy": Statistic("entropy", "nats", "spread of a row over all keys, ln(keys) when uniform"),
    "normalised_entropy": Statistic("entropy, share of ln(keys)", "fraction", "entropy over that of uniform attention"),
    "effective_keys": Statistic("effective number of keys", "keys", "exp of the entropy, a mean over rows"),
    "hoyer": Statistic("sparsity (Hoyer)", "fraction", "0 for uniform attention, 1 for a single key"),
    "gini": Statistic("sparsity (Gini)", "fraction", "inequality of a row's weights, 0 for uniform attention"),
}
STATISTICS: Final[Mapping[str, Statistic]] = MappingProxyType(
    {
        "distance": Statistic("attention distance", "px", "mean distance between a patch and what it looks at"),
        **_ROWS,
        "self_mass": Statistic("mass on itself", "fraction", "attention of a patch on its own token"),
        "neighbour_mass": Statistic("mass on neighbours", "fraction", "attention on the four adjoining patches"),
        "cls_mass": Statistic("mass on CLS", "fraction", "attention of patches on the CLS token"),
        "register_mass": Statistic("mass on registers", "fraction", "on registers and distillation token"),
        "prefix_mass": Statistic("mass on the prefix", "fraction", "on all tokens that stand before the patches"),
        "sinks": Statistic("sinks", "keys", "keys that receive more than median + 5 median absolute deviations"),
        "sink_mass": Statistic("mass on sinks", "fraction", "attention of patches that lies on those keys"),
        "energy": Statistic("mean square sum of a row", "", "sum of a patch row's squared weights on patches"),
        **{
            f"cls_{name}": Statistic(f"{row.title} of the CLS row", row.unit, f"{row.says}; the row of CLS")
            for name, row in _ROWS.items()
        },
        "cls_self_mass": Statistic("mass of CLS on itself", "fraction", "attention of the CLS token on itself"),
        "cls_register_mass": Statistic("mass of CLS on registers", "fraction", "attention of the CLS token on these"),
    }
)
TOKEN_STATISTICS: Final[Mapping[str, Statistic]] = MappingProxyType(
    {
        "token_norm": Statistic("median token norm", "", "length of a token after the block, the median of an image"),
        "greatest_norm": Statistic("greatest token norm", "", "the longest token of an image"),
        "high_norm_patches": Statistic(
            "high-norm patches", "tokens", "patches longer than median + 5 median absolute deviations"
        ),
        "high_norm_prefix": Statistic("high-norm prefix tokens", "tokens", "CLS or registers longer than that"),
    }
)


@dataclass(frozen=True)
class Statistics:
    """Means over images of every statistic of every head; table.entropy and so on are (layers, heads).

    Names are those of STATISTICS, and of TOKEN_STATISTICS with one column. NaN where a layer has none (pooled keys
    have no distance, a model without CLS no CLS row) or has fewer heads. images: how many; sites: the layers;
    geometries: where their tokens lie; offset_mass: for each layer (heads, 2 rows - 1, 2 columns - 1), the mean
    attention of patches by offset, key minus query, or None; renormalised: whether distances leave out the prefix;
    overall: means over all heads, by (statistic, 0).
    """

    images: int
    sites: tuple[Site, ...]
    geometries: tuple[Geometry | None, ...]
    offset_mass: tuple[Tensor | None, ...]
    moments: Moments
    overall: Moments
    renormalised: bool = True

    def __getattr__(self, name: str) -> PerHead:
        if name not in STATISTICS and name not in TOKEN_STATISTICS:
            known = ", ".join((*STATISTICS, *TOKEN_STATISTICS))
            raise AttributeError(f"no statistic {name!r}; known: {known}")
        return self._table(name, self.moments.mean)

    @property
    def heads(self) -> int:
        """Heads of the layer that has most: columns of a table."""
        return max(site.heads for site in self.sites)

    def low(self, name: str) -> PerHead:
        """The lower end of the mean's 95 % interval over images (Student's t); NaN for one image."""
        return self._table(name, lambda key: self.moments.mean(key) - self.moments.half_width(key))

    def high(self, name: str) -> PerHead:
        """The upper end of the mean's 95 % interval over images."""
        return self._table(name, lambda key: self.moments.mean(key) + self.moments.half_width(key))

    def uniform_distance(self) -> Float[Tensor, " layers"]:
        """What uniform attention over patches would give as distance in each layer, px; NaN where there is none."""
        found = [torch.nan if place is None else place.uniform_distance() for place in self.geometries]
        return torch.tensor(found, dtype=torch.float64)

    def _table(self, name: str, read: Callable[[tuple[str, int]], Tensor]) -> PerHead:
        rows = {layer: read((name, layer)) for known, layer in self.moments.sums if known == name}
        return per_head(rows, len(self.sites), heads=1 if name in TOKEN_STATISTICS else self.heads)


def per_head(rows: Mapping[int, Tensor], layers: int, *, heads: int = 1) -> PerHead:
    """One table of rows (heads,) by layer, for at least so many heads; NaN where a layer has no row or fewer heads."""
    widest = max((len(row) for row in rows.values()), default=1)
    table = torch.full((layers, max(widest, heads)), torch.nan, dtype=torch.float64)
    for layer, row in rows.items():
        table[layer, : len(row)] = row
    return table


def over_heads(values: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """The mean over all heads of all layers, (images, 1) by (statistic, 0), of values (images, heads) by layer."""
    rows: dict[str, list[Tensor]] = {}
    for (name, _), value in values.items():
        rows.setdefault(name, []).append(value)
    return {(name, 0): torch.cat(found, 1).double().mean(1, keepdim=True) for name, found in rows.items()}


class Stream:
    """Takes in batch after batch, and gives the statistics of all of them; memory does not grow with the images."""

    def __init__(self, model: Model, *, renormalise: bool = True) -> None:
        self.model, self.renormalise = model, renormalise
        self.moments, self.overall = Moments(), Moments()
        self.offsets: dict[int, Tensor] = {}
        self._sites: tuple[Site, ...] = ()

    def add(self, images: Images) -> Measured:
        """Measure a batch and take it in; what was measured, image by image."""
        found = measure(self.model, images, renormalise=self.renormalise)
        self.moments.add(found.values, found.images)
        self.overall.add(over_heads(found.values), found.images)
        for layer, mass in found.offsets.items():
            self.offsets[layer] = self.offsets[layer] + mass if layer in self.offsets else mass
        self._sites = tuple(found.sites)
        return found

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up what several processes took in; total: the sum of a tensor over all of them."""
        self.moments.join(total)
        self.overall.join(total)
        self.offsets = {layer: total(self.offsets[layer]) for layer in sorted(self.offsets)}

    def result(self) -> Statistics:
        """The statistics so far. Raises InputError before the first image."""
        if not self.moments.count:
            raise InputError("expected at least one image, found none")
        return Statistics(
            self.moments.count,
            self._sites,
            tuple(geometry_of(site, self.model) for site in self._sites),
            tuple(
                self.offsets[layer] / self.moments.count if layer in self.offsets else None
                for layer in range(len(self._sites))
            ),
            self.moments,
            self.overall,
            self.renormalise,
        )


def require_statistics(model: Model) -> None:
    """Raise UnsupportedError unless some layer's tokens look at tokens, each layer's heads alike."""
    sites = survey(model, probe_images(model, 1))
    if all(site.kind == "channel" for site in sites):
        raise UnsupportedError(
            f"expected layers in which tokens look at tokens, found channels that look at channels alone in "
            f"{model.alias}"
        )
    found = Measured(1)
    for site in sites:
        found.place(site)


@takes_images
def statistics(model: Model, images: Images, *, renormalise: bool = True, batch_size: int | None = None) -> Statistics:
    """How every head looks, as means over the images: distance, entropy, sparsity, what lies on CLS, itself, sinks.

    images: (n, 3, height, width) in [0, 1], taken batch_size at a time (None: chosen to fit); renormalise: distances
    are of the attention on patches alone. Raises UnsupportedError for a model without attention, NonFiniteError naming
    the layer whose weights are not finite.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> table = vitlens.statistics(vit, torch.rand(4, 3, 32, 32))
    >>> table.distance.shape == table.entropy.shape  # (layers, heads), px and nats
    True
    """
    require(model, "statistics")
    stream = Stream(model, renormalise=renormalise)
    for batch in images.split(batch_size or fitting_batch_size(model)):
        stream.add(batch.to(model.device))
    return stream.result()

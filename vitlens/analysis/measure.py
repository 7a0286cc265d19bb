"""One batch measured: for every image, layer and head, the numbers that say how the head looks.

Rows of patches and the row of CLS are told apart. No matrix of N x N outlives the few images it is computed for.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.geometry import Geometry, geometry_of
from vitlens.analysis.moments import Key
from vitlens.analysis.offsets import offset_sums
from vitlens.analysis.sharpness import entropy, gini, hoyer
from vitlens.analysis.sinks import median, stand_out
from vitlens.errors import InputError, NonFiniteError, UnsupportedError
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.observe import observe
from vitlens.lens.residual import watching_blocks
from vitlens.lens.site import Site
from vitlens.lens.windows import received
from vitlens.models.specimen import Specimen
from vitlens.shapes import Images, Tokens

PerImage = Float[Tensor, "images heads"]


@dataclass
class Measured:
    """A batch of images: values (images, heads) by statistic and layer; offsets: attention mass by offset, key minus
    query, summed over the images (heads, 2 rows - 1, 2 columns - 1); sites: the layers. A layer of several attention
    calls (ConViT's content and position, groups of heads) has the heads of all of them, one after another."""

    images: int
    values: dict[Key, PerImage] = field(default_factory=dict)
    offsets: dict[int, Tensor] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)

    def place(self, site: Site) -> None:
        """A new layer, or more heads of one. Raises UnsupportedError where they look at something else."""
        if site.part == 0:
            self.sites.append(site)
            return
        first = self.sites[site.layer]
        if replace(first, part=site.part, heads=site.heads) != site:
            raise UnsupportedError(
                f"expected attention calls of one shape in layer {site.layer} ({site.module}), found {first.queries} "
                f"queries and {first.keys} keys, then {site.queries} and {site.keys}; see vitlens models"
            )
        self.sites[site.layer] = replace(first, heads=first.heads + site.heads)

    def take(self, layer: int, values: dict[str, Tensor], offsets: Tensor | None) -> None:
        """The numbers of a layer, beside those of its other heads."""
        for name, value in values.items():
            known = self.values.get((name, layer))
            self.values[name, layer] = value if known is None else torch.cat((known, value), 1)
        if offsets is not None:
            self.offsets[layer] = torch.cat((self.offsets[layer], offsets)) if layer in self.offsets else offsets


def measure(specimen: Specimen, images: Images, *, renormalise: bool = True) -> Measured:
    """Every statistic of every head on these images, from one forward pass.

    renormalise: distances are those of the attention that lies on patches, scaled to 1; else the mass on CLS and other
    prefix tokens counts as 0 px. Weights are computed in fp32 at least, whatever the model runs in. Raises
    NonFiniteError naming the layer, UnsupportedError for a model without attention.
    """
    if not len(images):
        raise InputError("expected at least one image, found none")
    found = Measured(len(images))

    def take(call: AttentionCall) -> None:
        found.place(call.site)
        if call.site.kind == "channel":  # what looks at what, not where
            return
        with torch.autocast(images.device.type, enabled=False):
            values, offsets = _of_call(call, geometry_of(call.site, specimen), renormalise=renormalise)
        _require_finite(values, call.site)
        found.take(call.site.layer, values, offsets)

    def weigh(block: int, tokens: Tokens) -> None:
        layout = specimen.anatomy.layout
        prefix = len(layout.prefix) if layout is not None and tokens.shape[1] == layout.tokens else 0
        if len(tokens) == len(images) and tokens.shape[1] > max(prefix, 1):  # not windows, nor CLS alone
            found.values.update({(name, block): value for name, value in _norms(tokens, prefix).items()})

    with watching_blocks(specimen, weigh):
        observe(specimen, images, take)
    return found


def _of_call(
    call: AttentionCall, geometry: Geometry | None, *, renormalise: bool
) -> tuple[dict[str, PerImage], Tensor | None]:
    """One layer, a few images at a time."""
    parts: list[dict[str, Tensor]] = []
    total: Tensor | None = None
    for _, part in call.parts():
        weights = precise(part.precise().weights())
        if geometry is None:
            parts.append(_without_place(weights, part))
            continue
        view = _Looking(weights, part.images, geometry)
        offsets = view.offsets()
        parts.append({**view.sharpness(), **view.places(renormalise=renormalise), **view.masses(offsets)})
        summed = offsets.sum(0, dtype=torch.float64).cpu()
        total = summed if total is None else total + summed
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, total


def _sharp(weights: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The statistics of single rows, by name."""
    nats = entropy(weights)
    yield "entropy", nats
    yield "normalised_entropy", nats / max(math.log(weights.shape[-1]), 1e-12)
    yield "effective_keys", nats.exp()
    yield "hoyer", hoyer(weights)
    yield "gini", gini(weights)


def _without_place(weights: Tensor, call: AttentionCall) -> dict[str, Tensor]:
    """A pooling or CLS query's single row, or rows over pooled keys, which have no place of their own."""
    prefix = "cls_" if call.site.kind == "class" else ""
    rows = {prefix + name: value.mean(-1) for name, value in _sharp(weights)}
    return {name: value.unflatten(0, (call.images, -1)).mean(1) for name, value in rows.items()}


class _Looking:
    """Patches that look at patches: weights (images x calls, heads, query, key), calls being windows."""

    def __init__(self, weights: Tensor, images: int, geometry: Geometry) -> None:
        self.weights, self.images, self.geometry = weights, images, geometry
        self.queries = weights[..., geometry.prefix :, :]  # the patches' rows
        real = geometry.places().to(weights.device) >= 0
        self.looking = real.to(weights.dtype)  # (calls, patches): padding does not look
        self.rows = self.looking.sum()
        self.patches = self.between = self.queries[..., geometry.prefix :]  # of patches; of those that are neighbours
        if geometry.windows is not None:
            calls = self.patches.unflatten(0, (images, -1))
            self.patches = (calls * self.looking[:, None, None]).flatten(0, 1)
            self.between = (calls * geometry.pairs().to(weights.device)[:, None]).flatten(0, 1)

    def mean(self, values: Float[Tensor, "calls heads query"]) -> PerImage:
        """The mean over the patches that look."""
        each = values.unflatten(0, (self.images, -1)) * self.looking[:, None]
        means: PerImage = each.sum((1, 3)) / self.rows
        return means

    def sharpness(self) -> dict[str, PerImage]:
        """Entropy and sparsity, of patch rows and of the row of CLS."""
        found, prefix = {}, self.geometry.prefix
        for name, value in _sharp(self.weights):
            found[name] = self.mean(value[..., prefix:])
            if self.geometry.cls:
                found[f"cls_{name}"] = value[..., self.geometry.cls[0]]
        return found

    def places(self, *, renormalise: bool) -> dict[str, PerImage]:
        """How far it looks, and how much lies on its own place."""
        mass, pixels = self.patches.sum(-1), self.geometry.distances().to(self.weights)
        away = (self.patches.unflatten(0, (self.images, -1)) * pixels[:, None]).sum(-1).flatten(0, 1)
        if renormalise:
            away = away / mass.clamp_min(torch.finfo(mass.dtype).tiny)
        return {"distance": self.mean(away), "self_mass": self.mean(self.between.diagonal(dim1=-2, dim2=-1))}

    def offsets(self) -> Float[Tensor, "images heads down across"]:
        """Mass by offset, a mean over queries."""
        sums = offset_sums(self.between, self.geometry.grid)
        means: Tensor = sums.unflatten(0, (self.images, -1)).sum(1) / self.rows
        return means

    def masses(self, offsets: Float[Tensor, "images heads down across"]) -> dict[str, PerImage]:
        """How much lies on neighbours, prefix and sinks; the mean square of a weight, for the rules of offsets."""
        geometry = self.geometry
        (down, across), found = geometry.grid, {}
        sides = [offsets[:, :, down - 1 + y, across - 1 + x] for y, x in _sides(geometry.grid)]
        found["neighbour_mass"] = torch.stack(sides).sum(0) if sides else offsets.new_zeros(offsets.shape[:2])
        squares = self.between.square().sum((-2, -1)).unflatten(0, (self.images, -1)).sum(1)
        found["energy"] = squares / self.rows
        looked_at = self._received()
        sinks = stand_out(looked_at)
        found["sinks"] = sinks.sum(-1).to(looked_at.dtype)
        found["sink_mass"] = (looked_at * sinks * self._lookers()).sum(-1)
        if geometry.prefix:
            found["prefix_mass"] = looked_at[..., : geometry.prefix].sum(-1)
            found["cls_mass"] = looked_at[..., list(geometry.cls)].sum(-1)
            found["register_mass"] = looked_at[..., list(geometry.registers)].sum(-1)
        if geometry.cls:
            own = self.weights[..., geometry.cls[0], :]
            found["cls_self_mass"] = own[..., geometry.cls[0]]
            found["cls_register_mass"] = own[..., list(geometry.registers)].sum(-1)
        return found

    def _received(self) -> Float[Tensor, "images heads key"]:
        """The mean weight that each key receives from the patches."""
        if self.geometry.windows is None:
            return self.queries.mean(-2)
        return received(self.weights, self.geometry.windows).flatten(2)

    def _lookers(self) -> Float[Tensor, " key"]:
        """The share of all patches that can look at each key: all of them, or those of its window."""
        windows, places = self.geometry.windows, self.geometry.places().to(self.weights.device)
        if windows is None:
            return self.looking.new_ones(self.weights.shape[-1])
        share = self.looking.new_zeros(windows.resolution[0] * windows.resolution[1] + 1)  # the last is for padding
        share[places] = (self.looking.sum(-1, keepdim=True) / self.rows).expand(places.shape)
        return share[:-1]


def _sides(grid: tuple[int, int]) -> list[tuple[int, int]]:
    """The offsets of the neighbours that this grid has."""
    vertical = [(-1, 0), (1, 0)] if grid[0] > 1 else []
    return vertical + ([(0, -1), (0, 1)] if grid[1] > 1 else [])


def _norms(tokens: Tokens, prefix: int) -> dict[str, Float[Tensor, "images one"]]:
    """The length of each token in the residual stream: the middle one, the greatest, and how many stand out."""
    lengths = tokens.float().norm(dim=-1)
    high = stand_out(lengths).float()
    found = {
        "token_norm": median(lengths),
        "greatest_norm": lengths.amax(-1),
        "high_norm_patches": high[:, prefix:].sum(-1),
        "high_norm_prefix": high[:, :prefix].sum(-1),
    }
    return {name: value[:, None] for name, value in found.items()}


def _require_finite(values: dict[str, PerImage], site: Site) -> None:
    wrong = [name for name, value in values.items() if not torch.isfinite(value).all()]
    if wrong:
        raise NonFiniteError(
            f"expected finite attention weights, found NaN or infinity in layer {site.layer} ({site.module}); "
            "check the weights of the model, or run with --precision fp32"
        )

"""What the labels of heads are decided by: sums over images, kept apart for a few groups of images.

Groups make two things possible in memory that does not grow with the number of images: what one image does at a place
can be predicted from other images (cross-validation), and every score has a jackknife interval. All information is in
bits relative to uniform attention over the keys that a query can attend to.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.evaluation.intervals import Key
from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.rows import PatchRows, PerImage, ascending
from vitlens.lens.call import precise
from vitlens.shapes import Images

GROUPS: Final = 16  # of images: image i belongs to group i modulo 16
FEW: Final = 0.1  # of the patches: more keys that all queries share are an object or a region, not sinks
SIMILAR: Final = 0.1  # of the patches: those nearest in colour to the query patch
OF_LAYERS: Final = ("object_share", "similar_chance", "similar_offsets")  # the same for all heads
_ALIKE: Final = 1e-4  # of the range of pixels: colours this near differ by rounding
_TINY: Final = 1e-30


@dataclass
class HeadEvidence:
    """Sums over the images of each group: counts (groups,); sums (groups, ..) by name and layer.

    offsets (heads, down, across): mass by offset, key minus query; received (heads, keys): mean mass of each key; bits
    (heads,): information of a row, log2 of the number of keys minus its entropy; sinks (heads,): see sink_bits; object
    (heads,), object_share (): mass on the mask, and that of uniform attention; sinks_off (heads,): mass on sinks (see
    rows.outliers) off the mask; similar, popular (heads,): mass on patches of similar colour, and that expected from
    how much each key receives; similar_chance (): that of uniform attention; similar_offsets (down, across): pairs of
    similar patches by offset; output (heads,): mean norm of what the head adds to the residual stream.
    """

    counts: Float[Tensor, " groups"] = field(default_factory=lambda: torch.zeros(GROUPS, dtype=torch.float64))
    sums: dict[Key, Tensor] = field(default_factory=dict)

    def add(self, other: "HeadEvidence") -> None:
        """Add the sums of other images."""
        self.counts = self.counts + other.counts
        add_all(self.sums, other.sums)

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Combine the sums of several processes; total: the sum of a tensor over all of them."""
        self.counts = total(self.counts)
        for key in sorted(self.sums):
            self.sums[key] = total(self.sums[key])


def add_all(sums: dict[Key, Tensor], more: Mapping[Key, Tensor]) -> None:
    """Add tensors to those of the same key."""
    for key, value in more.items():
        sums[key] = sums[key] + value if key in sums else value


def by_group(values: Float[Tensor, "images *rest"], groups: Int[Tensor, " images"]) -> Float[Tensor, "groups *rest"]:
    """Sums over the images of each group, float64 on the CPU."""
    sums = torch.zeros(GROUPS, *values.shape[1:], dtype=torch.float64)
    return sums.index_add_(0, groups.cpu(), values.detach().double().cpu())


def evidence_of(layer: PatchRows, entropy: PerImage, similar: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """The evidence of some images of one layer, by name (images, ..); similar: see similar_pairs; mask: (images,
    patches), the share of each patch on the object, or None."""
    place, got = layer.geometry, layer.received_of_all
    on_patches = got[..., place.prefix :]
    pairs = similar.to(layer.weights)  # (images, calls, query, key)
    weights = layer.on_neighbours.unflatten(0, (layer.images, -1))  # (images, calls, heads, query, key)
    mean_row = weights.sum(-2) / layer.real.sum(-1)[:, None, None].clamp_min(1)
    keys = place.pairs().sum(-1).add(place.prefix).clamp_min(1).to(layer.weights)
    found = {
        "received": got,
        "bits": place.uniform().keys - entropy / math.log(2),
        "sinks": sink_bits(on_patches),
        "similar": torch.einsum("ichqk,icqk->ih", weights, pairs) / layer.count,
        "popular": torch.einsum("ichk,ick->ih", mean_row, pairs.sum(-2)) / layer.count,
        "similar_chance": (pairs.sum(-1) / keys).sum((1, 2)) / layer.count,
        "similar_offsets": place.by_offset(pairs).sum(1) / layer.count,
    }
    if mask is not None:
        shares = mask.to(layer.weights)
        off = layer.sinks[..., place.prefix :] * (1 - shares[:, None])
        found["object"] = (on_patches * shares[:, None]).sum(-1)
        found["sinks_off"] = (on_patches * off).sum(-1)
        found["object_share"] = (place.uniform().received.to(layer.weights)[place.prefix :] * shares).sum(-1)
    return found


def sink_bits(got: Float[Tensor, "images heads patches"]) -> PerImage:
    """How many bits it tells that a key is among the most attended ones of its image, at most FEW of the patches."""
    patches, mass = got.shape[-1], got.sum(-1)
    most = max(1, int(FEW * patches))
    top = ascending(got).flip(-1)[..., :most].cumsum(-1) / mass.clamp_min(_TINY)[..., None]
    share = torch.arange(1, most + 1, device=got.device, dtype=got.dtype) / patches
    return mass * bits_of_part(top, share).amax(-1)


def bits_of_part(mass: Tensor, expected: Tensor) -> Tensor:
    """The information in bits that a part of the keys has this share of the attention rather than the expected one;
    0 where it has less."""
    inside = mass.clamp(0, 1)
    chance = torch.as_tensor(expected).clamp(1e-9, 1 - 1e-9)
    bits = torch.xlogy(inside, inside / chance) + torch.xlogy(1 - inside, (1 - inside) / (1 - chance))
    return (bits / math.log(2)).where(inside > chance, torch.zeros_like(bits))


def on_grid(pixels: Tensor, place: Geometry) -> Float[Tensor, "images patches channels"]:
    """The mean of each channel over each patch of the map."""
    return F.adaptive_avg_pool2d(pixels.float(), place.map_grid).flatten(2).transpose(1, 2)


def similar_pairs(images: Images, place: Geometry) -> Bool[Tensor, "images calls query key"]:
    """For each patch, the SIMILAR share of patches nearest to it in mean colour, ties and itself included."""
    pairs, places = place.pairs().to(images.device), place.places().to(images.device).clamp_min(0)
    nearest = min(max(1, math.ceil(SIMILAR * place.patches)) + 1, place.patches)  # and itself
    found = []
    for colour in on_grid(images, place)[:, places]:  # one image at a time: distances of all pairs take memory
        apart = torch.cdist(colour, colour, compute_mode="donot_use_mm_for_euclid_dist").masked_fill(~pairs, torch.inf)
        found.append((apart <= apart.kthvalue(nearest, -1, keepdim=True).values + _ALIKE) & pairs)
    return torch.stack(found)


def head_norms(output: Float[Tensor, "calls heads tokens head_dim"], projection: nn.Linear | None) -> Tensor:
    """The mean norm over tokens (calls, heads) of what each head adds to the residual stream; of its output without a
    projection."""
    heads, width = output.shape[1], output.shape[-1]
    if projection is not None and projection.in_features == heads * width:
        columns = precise(projection.weight).unflatten(1, (heads, width)).movedim(1, 0)  # (heads, dim, head_dim)
        squares = (output @ (columns.transpose(1, 2) @ columns)).mul(output).sum(-1)
    else:
        squares = output.square().sum(-1)
    norms: Tensor = squares.clamp_min(0).sqrt().mean(-1)
    return norms

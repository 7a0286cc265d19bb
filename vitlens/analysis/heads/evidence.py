"""The evidence for the labels of heads: sums over images, kept apart for a few groups of images.

Sums by group need memory that does not grow with the number of images, and make two things
possible. Attention at a place can be predicted from other images (cross-validation), and every
score has a jackknife interval. All information is in bits, relative to uniform attention over the
keys that a query can attend to.
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

GROUPS: Final = 16  # groups of images: image i belongs to group i modulo 16
# sinks are at most this part of the patches: more keys in common are an object or a region
FEW: Final = 0.1
SIMILAR: Final = 0.1  # similar patches are this part of all, those nearest in colour
# names of evidence that is the same for all heads of a layer
OF_LAYERS: Final = ("object_share", "high_norm_share", "similar_chance", "similar_offsets")
_ALIKE: Final = 1e-4  # colours that differ less, of a range from 0 to 1, differ by rounding
_TINY: Final = 1e-30  # avoids a division by 0
_SMALLEST_CHANCE: Final = 1e-9  # least expected mass of some keys, so that its logarithm is finite


@dataclass
class HeadEvidence:
    """Sums over the images of each group.

    counts (groups,): the number of images in each group.
    sums (groups, ..): sums over the images of a group, by name and layer.

    The names in `sums`, with the shape for one group:

    offsets (heads, down, across): the mass by offset, key minus query.
    received (heads, keys): the mean mass of each key.
    bits (heads,): the information in a row, log2 of the number of keys minus its entropy.
    sinks (heads,): the bits that the most attended keys explain, see `sink_bits`.
    object (heads,): the mass on the mask of the object.
    object_share (): the mass of uniform attention on the mask.
    sinks_off (heads,): the mass on sinks (see rows.outliers) off the mask.
    similar (heads,): the mass on patches of similar colour.
    popular (heads,): this mass if every query attended to keys as the mean query does.
    similar_chance (): this mass for uniform attention.
    similar_offsets (down, across): the number of pairs of similar patches by offset.
    high_norm (heads,): the mass on patches of exceptional norm.
    high_norm_share (): this mass for uniform attention.
    output (heads,): the mean norm of what the head adds to the residual stream.
    """

    counts: Float[Tensor, " groups"] = field(
        default_factory=lambda: torch.zeros(GROUPS, dtype=torch.float64)
    )
    sums: dict[Key, Tensor] = field(default_factory=dict)

    def add(self, other: "HeadEvidence") -> None:
        """Add the sums of other images."""
        self.counts = self.counts + other.counts
        add_all(self.sums, other.sums)

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Combine the sums of several processes.

        total: returns the sum of a tensor over all processes.
        """
        self.counts = total(self.counts)
        for key in sorted(self.sums):
            self.sums[key] = total(self.sums[key])


def add_all(sums: dict[Key, Tensor], more: Mapping[Key, Tensor]) -> None:
    """Add tensors to those of the same key."""
    for key, value in more.items():
        sums[key] = sums[key] + value if key in sums else value


def by_group(
    values: Float[Tensor, "images *rest"], groups: Int[Tensor, " images"]
) -> Float[Tensor, "groups *rest"]:
    """Return sums over the images of each group, float64 on the CPU."""
    sums = torch.zeros(GROUPS, *values.shape[1:], dtype=torch.float64)
    return sums.index_add_(0, groups.cpu(), values.detach().double().cpu())


def jackknife_means(
    sums: Float[Tensor, "groups *rest"], counts: Tensor
) -> Float[Tensor, "samples *rest"]:
    """Return the mean over all images, then the means without the images of each group."""
    total = sums.sum(0)
    images = counts.sum()
    samples = [total / images]
    for group, count in enumerate(counts):
        if 0 < count < images:
            samples.append((total - sums[group]) / (images - count))
    return torch.stack(samples)


def half_width(samples: Float[Tensor, " samples"]) -> float:
    """Return half the width of the 95 % interval over images; NaN for fewer than two groups.

    The interval is Student's t of the delete-a-group jackknife.

    samples: a value on all images, then the values without each group of images.
    """
    without_group = samples[1:]
    groups = len(without_group)
    if groups < 2:
        return math.nan
    squares = (without_group - without_group.mean()).square().sum()
    error = ((groups - 1) / groups * squares).sqrt()
    from scipy import stats  # takes half a second to import, and not every command needs it

    return float(stats.t.ppf(0.975, groups - 1) * error)


def evidence_of(
    layer: PatchRows, entropy: PerImage, similar: Tensor, mask: Tensor | None, high: Tensor | None
) -> dict[str, Tensor]:
    """Return the evidence of some images of one layer, by its name in `HeadEvidence`.

    similar: the pairs of similar patches, see `similar_pairs`.
    mask (images, patches): the share of each patch that lies on the object, or None.
    high (images, patches): 1 for a patch of exceptional norm in the stream before the layer, or
        None.
    """
    geometry = layer.geometry
    prefix = geometry.prefix
    mass = layer.received_of_all  # (images, heads, key)
    on_patches = mass[..., prefix:]
    uniform = geometry.uniform()
    uniform_on_patches = uniform.received.to(layer.weights)[prefix:]
    is_similar = similar.to(layer.weights)  # (images, calls, query, key), a call being a window
    # as (images, calls, heads, query, key)
    weights = layer.on_patches_in_image.unflatten(0, (layer.images, -1))
    # the row of the mean query of each window, (images, calls, heads, key)
    mean_row = weights.sum(-2) / layer.is_patch.sum(-1)[:, None, None].clamp_min(1)
    similar_queries = is_similar.sum(-2)  # the number for each key, (images, calls, key)
    # the number of keys of each query, (calls, query)
    key_counts = geometry.pairs().sum(-1).add(prefix).clamp_min(1).to(layer.weights)
    # below, i are images, c calls, h heads, q queries and k keys
    evidence = {
        "received": mass,
        "bits": uniform.keys - entropy / math.log(2),
        "sinks": sink_bits(on_patches),
        "similar": torch.einsum("ichqk,icqk->ih", weights, is_similar) / layer.count,
        # what a head would get whose queries all have the mean row: sums over queries
        "popular": torch.einsum("ichk,ick->ih", mean_row, similar_queries) / layer.count,
        "similar_chance": (is_similar.sum(-1) / key_counts).sum((1, 2)) / layer.count,
        "similar_offsets": geometry.by_offset(is_similar).sum(1) / layer.count,
    }
    if mask is not None:
        shares = mask.to(layer.weights)
        sinks_off = layer.sinks[..., prefix:] * (1 - shares[:, None])
        evidence["object"] = (on_patches * shares[:, None]).sum(-1)
        evidence["sinks_off"] = (on_patches * sinks_off).sum(-1)
        evidence["object_share"] = (uniform_on_patches * shares).sum(-1)
    if high is not None:
        high = high.to(layer.weights)
        evidence["high_norm"] = (on_patches * high[:, None]).sum(-1)
        evidence["high_norm_share"] = (uniform_on_patches * high).sum(-1)
    return evidence


def sink_bits(received: Float[Tensor, "images heads patches"]) -> PerImage:
    """Return the bits explained by the most attended keys of an image.

    Their number, at most the part FEW of the patches, is the one that explains most.
    """
    patches = received.shape[-1]
    total = received.sum(-1)
    most = max(1, int(FEW * patches))
    descending = ascending(received).flip(-1)
    mass_of_top = descending[..., :most].cumsum(-1)  # of the top 1, 2, .. keys
    share_of_top = mass_of_top / total.clamp_min(_TINY)[..., None]
    key_counts = torch.arange(1, most + 1, device=received.device, dtype=received.dtype)
    return total * bits_of_part(share_of_top, key_counts / patches).amax(-1)


def bits_of_part(mass: Tensor, expected: Tensor) -> Tensor:
    """Return the bits that the mass on a part of the keys explains; 0 below the expected mass.

    They are the Kullback-Leibler divergence between the mass on and off the part, and the expected.
    """
    inside = mass.clamp(0, 1)
    chance = torch.as_tensor(expected).clamp(_SMALLEST_CHANCE, 1 - _SMALLEST_CHANCE)
    gain_inside = torch.xlogy(inside, inside / chance)
    gain_outside = torch.xlogy(1 - inside, (1 - inside) / (1 - chance))
    bits = gain_inside + gain_outside
    return (bits / math.log(2)).where(inside > chance, torch.zeros_like(bits))


def on_grid(pixels: Tensor, geometry: Geometry) -> Float[Tensor, "images patches channels"]:
    """Return the mean of each channel over each patch of the map."""
    means = F.adaptive_avg_pool2d(pixels.float(), geometry.map_grid)
    return means.flatten(2).transpose(1, 2)


def similar_pairs(images: Images, geometry: Geometry) -> Bool[Tensor, "images calls query key"]:
    """Return the pairs of each patch with the patches nearest to it in mean colour.

    The nearest are the part SIMILAR of the patches. Ties and the patch itself are included.
    """
    pairs = geometry.pairs().to(images.device)
    # padding has the place -1; as it is in no pair, any place will do for it
    places = geometry.places().to(images.device).clamp_min(0)
    count = max(1, math.ceil(SIMILAR * geometry.patches)) + 1  # the patch itself is one of them
    count = min(count, geometry.patches)
    colours_of_images = on_grid(images, geometry)[:, places]  # (images, calls, patches, 3)
    similar = []
    # one image at a time, as the distances of all pairs take memory
    for colours in colours_of_images:
        # without matrix products, which round the distance of equal colours
        distances = torch.cdist(colours, colours, compute_mode="donot_use_mm_for_euclid_dist")
        distances = distances.masked_fill(~pairs, torch.inf)
        farthest = distances.kthvalue(count, -1, keepdim=True).values
        similar.append((distances <= farthest + _ALIKE) & pairs)
    return torch.stack(similar)


def head_norms(
    output: Float[Tensor, "calls heads tokens head_dim"], projection: nn.Linear | None
) -> Float[Tensor, "calls heads"]:
    """Return the mean norm over tokens of what each head adds to the residual stream.

    Without a projection it is the norm of the head's output.
    """
    heads = output.shape[1]
    head_dim = output.shape[-1]
    if projection is not None and projection.in_features == heads * head_dim:
        # as (heads, dim, head_dim)
        columns = precise(projection.weight).unflatten(1, (heads, head_dim)).movedim(1, 0)
        # |W o|² = oᵀ (Wᵀ W) o needs matrices of head_dim x head_dim only
        gram = columns.transpose(1, 2) @ columns
        squares = (output @ gram).mul(output).sum(-1)
    else:
        squares = output.square().sum(-1)
    norms: Tensor = squares.clamp_min(0).sqrt().mean(-1)
    return norms

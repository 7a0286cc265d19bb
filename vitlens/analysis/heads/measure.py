"""One batch measured: for every image, layer and head, the numbers that say how the head looks.

No matrix of N x N outlives the few images it is computed for.
"""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.answers.moments import Key
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.analysis.heads.patch_rows import PatchRows, PerImage, sharp
from vitlens.analysis.heads.sinks import median, stand_out
from vitlens.errors import InputError, NonFiniteError, UnsupportedError
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.capture import watching_stream
from vitlens.lens.observe import observe
from vitlens.lens.site import Site
from vitlens.models.model import Model
from vitlens.shapes import Images, Tokens


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
                f"queries and {first.keys} keys, then {site.queries} and {site.keys}"
            )
        self.sites[site.layer] = replace(first, heads=first.heads + site.heads)

    def take(self, layer: int, values: dict[str, Tensor], offsets: Tensor | None) -> None:
        """The numbers of a layer, beside those of its other heads."""
        for name, value in values.items():
            known = self.values.get((name, layer))
            self.values[name, layer] = value if known is None else torch.cat((known, value), 1)
        if offsets is not None:
            self.offsets[layer] = torch.cat((self.offsets[layer], offsets)) if layer in self.offsets else offsets


def measure(model: Model, images: Images, *, renormalise: bool = True) -> Measured:
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
            values, offsets = _of_call(call, geometry_of(call.site, model), renormalise=renormalise)
        _require_finite(values, call.site)
        found.take(call.site.layer, values, offsets)

    def weigh(block: int, tokens: Tokens) -> None:
        layout = model.anatomy.layout
        prefix = len(layout.prefix) if layout is not None and tokens.shape[1] == layout.tokens else 0
        if len(tokens) == len(images) and tokens.shape[1] > max(prefix, 1):  # not windows, nor CLS alone
            found.values.update({(name, block): value for name, value in _norms(tokens, prefix).items()})

    with watching_stream(model, weigh):
        observe(model, images, take)
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
        view = PatchRows(weights, part.images, geometry)
        offsets = view.offsets()
        parts.append({**view.sharpness(), **view.places(renormalise=renormalise), **view.masses(offsets)})
        summed = offsets.sum(0, dtype=torch.float64).cpu()
        total = summed if total is None else total + summed
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, total


def _without_place(weights: Tensor, call: AttentionCall) -> dict[str, Tensor]:
    """A pooling or CLS query's single row, or rows over pooled keys, which have no place of their own."""
    prefix = "cls_" if call.site.kind == "class" else ""
    rows = {prefix + name: value.mean(-1) for name, value in sharp(weights)}
    return {name: value.unflatten(0, (call.images, -1)).mean(1) for name, value in rows.items()}


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

"""The chain of attention layers: a row over the tokens followed from the readout back to the image.

Rollout, relevance and their kin differ in one step alone: what a row becomes one layer further down. The way of the
row is here: windows, the merging of patches between the stages of a Swin, the readout at its end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.attention.gradients import with_gradients
from vitlens.analysis.attention.readout import readout_row
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.layout import TokenLayout
from vitlens.lens.call import AttentionCall, precise, window_index
from vitlens.lens.layers import probe_images
from vitlens.lens.observe import observe, survey
from vitlens.lens.site import KIND_WORDS, NO_PLACE, Site
from vitlens.models.model import Model
from vitlens.models.support import require
from vitlens.names import READOUTS, Readout
from vitlens.shapes import Images, Labels, Logits, Maps, Weights

Vector = Float[Tensor, "batch tokens"]
PoolingWeights = Callable[[AttentionCall], Float[Tensor, "batch keys"]]
Pool = Callable[[Sequence[Float[Tensor, "batch keys"]]], Vector]
# What a row (batch, tokens) becomes one layer further down, from the weights (batch, heads, query, key), the gradient
# of a target with respect to them where the chain has one, and whether the weights' rows sum to 1 (padding left out)
Step = Callable[[Vector, Weights, Weights | None, bool], Vector]


@dataclass(frozen=True)
class Chain:
    """One forward pass: its logits (batch, classes), and its attention calls in order, with gradients if asked for."""

    model: Model
    logits: Logits
    calls: tuple[AttentionCall, ...]
    readout: Readout

    def start(self, *, pooling: PoolingWeights, pool: Pool, start_layer: int = 0) -> Vector:
        """Where the classifier reads, as a row over the tokens of the last layer.

        pooling: weights of a pooling query with the heads fused; pool: what these make of the readout.
        """
        first, layout = self.calls[0], self.model.anatomy.layout
        like = precise(first.rows((0,)))
        if layout is None:  # windows: the mean over the patches of the last stage
            last = self.calls[-1].site.windows
            assert last is not None  # chain_length has let nothing else through
            patches = last.resolution[0] * last.resolution[1]
            return like.new_full((first.images, patches), 1 / patches)
        if self.readout == "pool":
            late = [call for call in self.calls if call.site.kind == "class" and call.site.layer >= start_layer]
            return pool([_over_tokens(pooling(call), layout) for call in late])
        return readout_row(layout, self.readout, batch=first.images, like=like)

    def follow(self, row: Vector, step: Step, *, start_layer: int = 0) -> Float[Tensor, "batch first_tokens"]:
        """A row over the last layer's tokens, followed down to start_layer; in windows, to their first stage."""
        finer: tuple[int, int] | None = None
        for call in reversed(self.calls):
            if call.site.kind == "class":
                continue
            windows = call.site.windows
            if windows is not None:
                row = _unmerge(row, finer, windows.resolution) if finer else row
                finer = windows.resolution
            if call.site.layer >= start_layer:
                row = _step(row, call, step)
        return row

    def as_map(self, row: Vector) -> Maps:
        """A followed row as a map over the patches, prefix columns dropped."""
        if self.model.anatomy.layout is not None:
            return self.model.layout.as_map(row)
        windows = self.calls[0].site.windows
        assert windows is not None  # chain_length has let nothing else through
        maps: Maps = row.unflatten(-1, windows.resolution)
        return maps


def chained(
    model: Model,
    images: Images,
    *,
    targets: Labels | None = None,
    gradient: bool = False,
    readout: Readout | None = None,
) -> Chain:
    """The chain of a batch of images; gradient: with those of the targets' logits (None: of the predicted classes').

    Queries and keys of all layers are kept (tokens x dim each, not heads x tokens²). Raises UnknownNameError for a
    readout that is none, InputError for a target that is no class, UnsupportedError for gradients of a model without a
    classifier.
    """
    chosen = readout or model.anatomy.readout or "mean"
    if chosen not in READOUTS:
        raise UnknownNameError("readout", chosen, READOUTS)
    if model.anatomy.layout is None and chosen != "mean":
        raise UnsupportedError(
            f"expected the readout mean for {model.alias}, which has no one sequence of tokens, found {chosen}"
        )
    if gradient:
        model.require_classifier()
        logits, calls = with_gradients(model, images, targets)
        return Chain(model, logits, calls, chosen)
    found: list[AttentionCall] = []
    return Chain(model, observe(model, images, found.append), tuple(found), chosen)


def over_batches(
    model: Model,
    images: Images,
    follow: Callable[[Chain], Maps],
    *,
    targets: Labels | None = None,
    gradient: bool = False,
    readout: Readout | None = None,
) -> Maps:
    """One map an image, a batch that fits at a time."""
    if targets is not None and len(targets) != len(images):
        raise InputError(f"expected one target an image ({len(images)}), found {len(targets)}")
    size = fitting_batch_size(model)
    parts = []
    for start in range(0, len(images), size):
        own = None if targets is None else targets[start : start + size]
        batch = images[start : start + size].to(model.device)
        chain = chained(model, batch, targets=own, gradient=gradient, readout=readout)
        with exactly(batch.device):
            parts.append(follow(chain))
    return torch.cat(parts)


def exactly(device: torch.device) -> torch.autocast:
    """No mixed precision here, whatever the model ran in: rows would no longer sum to 1."""
    return torch.autocast(device.type, enabled=False)


def chain_length(model: Model, images: Images) -> int:
    """How many layers can be chained. Raises UnsupportedError for a model in which some cannot."""
    require(model, "chain")
    return 1 + max(site.layer for site in survey(model, images[:1].to(model.device)))


def require_chain(model: Model) -> None:
    """Raise UnsupportedError for a model in which attention cannot be followed from the readout to the image."""
    coarser: tuple[int, int] | None = None
    layout = model.anatomy.layout
    sites = survey(model, probe_images(model, 1))
    misfits = [site for site in sites if not _fits(site, layout)]
    if misfits:
        # name the layer that explains most: tokens of another stage explain less than pooled keys, channels or windows
        site = min(misfits, key=lambda site: site.kind in ("patch", "class"))
        other = {
            "patch": f", but of a stage with {site.keys} tokens of its own",
            "window": f", and {NO_PLACE['window']}",
        }.get(site.kind, "")
        raise UnsupportedError(
            "expected layers over one sequence of tokens, or windows that can be put back into the image (Swin), found "
            f"{site.module!r} of {model.alias}: {KIND_WORDS[site.kind]}{other}"
        )
    for site in reversed(sites):
        if site.windows is not None:
            if coarser not in (None, site.windows.resolution, _merged(site.windows.resolution)):
                raise UnsupportedError(
                    f"expected stages that merge 2x2 patches, found {site.windows.resolution} before {coarser} in "
                    f"{model.alias}"
                )
            coarser = site.windows.resolution


def _over_tokens(row: Float[Tensor, "batch keys"], layout: TokenLayout) -> Float[Tensor, "batch _"]:
    """A pooling query's row; where it is shown the patches alone (timm's default), it has nothing of the prefix."""
    return F.pad(row, (len(layout.prefix), 0)) if row.shape[-1] == layout.patches else row


def _fits(site: Site, layout: TokenLayout | None) -> bool:
    """Whether a row over the tokens can be followed through this layer."""
    if layout is None:
        return site.windows is not None
    return site.kind == "class" or (site.kind == "patch" and site.keys == layout.tokens)


def _merged(resolution: tuple[int, int]) -> tuple[int, int]:
    """The resolution after 2x2 patches have become one."""
    return -(-resolution[0] // 2), -(-resolution[1] // 2)


def _unmerge(
    row: Float[Tensor, "batch merged"], coarse: tuple[int, int], fine: tuple[int, int]
) -> Float[Tensor, "batch unmerged"]:
    """A row over merged patches as one over those they were made of: each shares its mass among them equally.

    Merging concatenates 2x2 patches and projects them, so that none of the four comes before the others.
    """
    if coarse == fine:
        return row
    padded = tuple(2 * side for side in coarse)
    real = F.pad(row.new_ones(1, 1, *fine), (0, padded[1] - fine[1], 0, padded[0] - fine[0]))
    children = F.avg_pool2d(real, 2) * 4
    shared = row.unflatten(-1, coarse).unsqueeze(1) / children
    large = F.interpolate(shared, scale_factor=2, mode="nearest")[:, 0, : fine[0], : fine[1]]
    return large.flatten(1)


def _step(row: Vector, call: AttentionCall, step: Step) -> Vector:
    """One layer, a few images at a time, window by window where there are windows."""
    windows, rows = call.site.windows, []
    for images, part in call.parts():
        own, exact = row[images], part.precise()
        weights, gradient = precise(exact.weights()), exact.weight_gradient()
        if windows is None:
            rows.append(step(own, weights, gradient, True))
            continue
        index = window_index(windows).to(row.device)
        real = index >= 0
        place = index.masked_fill(~real, own.shape[-1])  # padding has a column of its own, dropped at the end
        inside = F.pad(own, (0, 1))[:, place].flatten(0, 1)  # (images x windows, tokens of a window)
        seen = weights.unflatten(0, (part.images, -1)) * real[:, None, None]
        moved = step(inside, seen.flatten(0, 1), gradient, bool(real.all()))
        full = F.pad(torch.zeros_like(own), (0, 1))
        full[:, place.flatten()] = moved.view(part.images, -1)
        rows.append(full[:, :-1])
    return torch.cat(rows)

"""The chain of attention layers: propagates a row over the tokens from the readout back to the image.

Rollout, relevance and similar methods differ only in the step that propagates the row through one layer. The parts
that they share are here: windows, the merging of patches between the stages of a Swin, the readout.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.attention.gradients import Rules, with_gradients
from vitlens.analysis.attention.readout import readout_row
from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.devices import evaluating
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.layout import TokenLayout
from vitlens.lens.call import AttentionCall, precise, row_by_row, window_index
from vitlens.lens.layers import probe_images
from vitlens.lens.observe import observe, survey_weights
from vitlens.lens.site import KIND_WORDS, NO_PLACE, Site
from vitlens.models.hooks import watching
from vitlens.models.model import Model
from vitlens.models.support import require
from vitlens.names import READOUTS, Readout
from vitlens.pixels import Parts
from vitlens.shapes import Images, Labels, Logits, Maps, Weights

Vector = Float[Tensor, "batch tokens"]
PoolingWeights = Callable[[AttentionCall], Float[Tensor, "batch keys"]]
Pool = Callable[[Sequence[Float[Tensor, "batch keys"]]], Vector]
# Propagates a row (batch, tokens) through one layer, towards the input. Given are the weights (batch, heads, query,
# key), the gradient of a target with respect to them or None, and whether the rows of the weights sum to 1 (they do not
# where padding is left out)
Step = Callable[[Vector, Weights, Weights | None, bool], Vector]


@dataclass(frozen=True)
class Chain:
    """One forward pass: its logits (batch, classes) and its attention calls in order, with gradients or without."""

    model: Model
    logits: Logits
    calls: tuple[AttentionCall, ...]
    readout: Readout

    def start(self, *, pooling: PoolingWeights, pool: Pool, start_layer: int = 0) -> Vector:
        """The readout as a row over the tokens of the last layer.

        pooling: returns the weights of a pooling query with the heads fused; pool: combines them into the row.
        """
        first, layout = self.calls[0], self.model.anatomy.layout
        like = precise(first.rows((0,)))
        if layout is None:  # windows: the mean over the patches of the last stage
            last = self.calls[-1].site.windows
            assert last is not None  # other models are refused by chain_length
            patches = last.resolution[0] * last.resolution[1]
            return like.new_full((first.images, patches), 1 / patches)
        if self.readout == "pool":
            class_calls = [call for call in self.calls if call.site.kind == "class" and call.site.layer >= start_layer]
            return pool([_over_tokens(pooling(call), layout) for call in class_calls])
        return readout_row(layout, self.readout, batch=first.images, like=like)

    def follow(self, row: Vector, step: Step, *, start_layer: int = 0) -> Float[Tensor, "batch first_tokens"]:
        """A row over the last layer's tokens, propagated down to start_layer; for windows, to the first stage."""
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
        """A propagated row as a map over the patches, without the prefix."""
        if self.model.anatomy.layout is not None:
            return self.model.layout.as_map(row)
        windows = self.calls[0].site.windows
        assert windows is not None  # other models are refused by chain_length
        maps: Maps = row.unflatten(-1, windows.resolution)
        return maps


def chained(
    model: Model,
    images: Images,
    *,
    targets: Labels | None = None,
    gradient: bool = False,
    rules: Rules = "plain",
    readout: Readout | None = None,
) -> Chain:
    """The chain of a batch of images; gradient: with gradients of the targets' logits (None: predicted classes).

    Queries and keys of all layers are stored (tokens x dim each, not heads x tokens²). Raises UnknownNameError for an
    unknown readout, InputError for a target that is no class, UnsupportedError for gradients of a model without a
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
        logits, calls = with_gradients(model, images, targets, rules=rules)
        return Chain(model, logits, calls, chosen)
    observed: list[AttentionCall] = []
    logits = observe(model, images, observed.append)
    return Chain(model, logits, tuple(observed), chosen)


def over_batches(
    model: Model,
    images: Parts,
    follow: Callable[[Chain], Tensor],
    *,
    targets: Labels | None = None,
    gradient: bool = False,
    rules: Rules = "plain",
    readout: Readout | None = None,
) -> Tensor:
    """The maps of each image, computed in batches that fit in memory."""
    if targets is not None and len(targets) != len(images):
        raise InputError(f"expected one target per image ({len(images)}), found {len(targets)}")
    size = max(1, fitting_batch_size(model) // (BACKWARD if gradient else 1))
    parts = []
    for start in range(0, len(images), size):
        own = None if targets is None else targets[start : start + size]
        batch = images[start : start + size].to(model.device)
        chain = chained(model, batch, targets=own, gradient=gradient, rules=rules, readout=readout)
        with without_autocast(batch.device):
            parts.append(follow(chain))
    return torch.cat(parts)


def without_autocast(device: torch.device) -> torch.autocast:
    """Disable mixed precision, with which rows would not sum to 1."""
    return torch.autocast(device.type, enabled=False)


def chain_length(model: Model, images: Parts) -> int:
    """The number of layers of the chain. Raises UnsupportedError for a model whose layers cannot all be chained."""
    require(model, "chain")
    return 1 + max(site.layer for site in survey_weights(model, images[:1].to(model.device)))


def require_chain(model: Model) -> None:
    """Raise UnsupportedError for a model whose attention cannot be propagated from the readout to the image."""
    coarser: tuple[int, int] | None = None
    layout = model.anatomy.layout
    sites = survey_weights(model, probe_images(model, 1))
    misfits = [site for site in sites if not _fits(site, layout)]
    if misfits:
        # the most informative layer: pooled keys, channels or windows rather than tokens of another stage
        site = min(misfits, key=lambda site: site.kind in ("patch", "class"))
        other = {
            "patch": f", but of a stage with {site.keys} tokens of its own",
            "window": f", and {NO_PLACE['window']}",
        }.get(site.kind, "")
        raise UnsupportedError(
            "expected layers over one sequence of tokens, or windows that can be put back into the image (Swin), found "
            f"{site.module!r} of {model.alias}: {KIND_WORDS[site.kind]}{other}"
        )
    if layout is None:
        _require_no_convolution(model, {site.module for site in sites})
    for site in reversed(sites):
        if site.windows is not None:
            if coarser not in (None, site.windows.resolution, _merged(site.windows.resolution)):
                raise UnsupportedError(
                    f"expected stages that merge 2x2 patches, found {site.windows.resolution} before {coarser} in "
                    f"{model.alias}"
                )
            coarser = site.windows.resolution


def _require_no_convolution(model: Model, attention: Collection[str]) -> None:
    """Raise UnsupportedError where a convolution mixes patches between two attention layers (MaxViT)."""
    mixing = [
        name
        for name, module in model.module.named_modules()
        if isinstance(module, nn.Conv2d)
        and any(size > step for size, step in zip(module.kernel_size, module.stride, strict=True))
    ]
    order: list[str] = []
    seen = watching(model.module, [*mixing, *attention], lambda name, *_: order.append(name))
    with seen, evaluating(model), torch.no_grad():
        model(probe_images(model, 1))
    places = [place for place, name in enumerate(order) if name in attention]
    between = [name for name in order[places[0] : places[-1]] if name not in attention]
    if between:
        raise UnsupportedError(
            f"expected attention layers with nothing between them that mixes patches, found {len(between)} "
            f"convolutions in {model.alias} (first {between[0]!r}); try --method attention, or vitlens attention, "
            "stats or ablate"
        )


def _over_tokens(row: Float[Tensor, "batch keys"], layout: TokenLayout) -> Float[Tensor, "batch _"]:
    """A pooling query's row over all tokens, 0 on the prefix where its keys are the patches only (timm's default)."""
    return F.pad(row, (len(layout.prefix), 0)) if row.shape[-1] == layout.patches else row


def _fits(site: Site, layout: TokenLayout | None) -> bool:
    """Whether a row over the tokens can be propagated through this layer."""
    if layout is None:
        return site.windows is not None
    return site.kind == "class" or (site.kind == "patch" and site.part == 0 and site.keys == layout.tokens)


def _merged(resolution: tuple[int, int]) -> tuple[int, int]:
    """The resolution after merging 2x2 patches."""
    return -(-resolution[0] // 2), -(-resolution[1] // 2)


def _unmerge(
    row: Float[Tensor, "batch merged"], coarse: tuple[int, int], fine: tuple[int, int]
) -> Float[Tensor, "batch unmerged"]:
    """A row over merged patches as one over the patches before merging, each patch's mass shared equally.

    Merging concatenates 2x2 patches and projects them, so all four count equally.
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
    """Propagate through one layer, a few images at a time, within windows where there are some."""
    windows, rows = call.site.windows, []
    for images, part in call.parts():
        own, exact = row[images], part.precise()
        weights, gradient = precise(exact.placed()), exact.weight_gradient()
        if windows is None:
            rows.append(step(own, weights, gradient, True))
            continue
        gradient = None if gradient is None else row_by_row(gradient, windows)
        index = window_index(windows).to(row.device)
        real = index >= 0
        place = index.masked_fill(~real, own.shape[-1])  # padding is in an extra column, dropped at the end
        inside = F.pad(own, (0, 1))[:, place].flatten(0, 1)  # (images x windows, tokens of a window)
        visible = weights.unflatten(0, (part.images, -1)) * real[:, None, None]
        moved = step(inside, visible.flatten(0, 1), gradient, bool(real.all()))
        full = F.pad(torch.zeros_like(own), (0, 1))
        full[:, place.flatten()] = moved.view(part.images, -1)
        rows.append(full[:, :-1])
    return torch.cat(rows)

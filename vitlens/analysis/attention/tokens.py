"""What looks where in single images: the attention of every head between all tokens, and the rollout by layer.

For a viewer that a reader points at patches with, of few images.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import readout_row, without_autocast
from vitlens.analysis.attention.methods import rollouts_so_far
from vitlens.analysis.attention.registry import WHOLE
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.observe import observe, survey_weights
from vitlens.lens.site import KIND_WORDS
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.names import Readout
from vitlens.shapes import Images

_BYTES = 1 << 28  # of the layers' means over heads, in single precision, that are held at a time


@dataclass(frozen=True)
class TokenAttention:
    """What looks where in n images, over the model's tokens (its layout); rows sum to 1. float32, on the CPU.

    heads (whole, layers, heads, queries, keys): of the first images; means (n, layers, queries, keys): over heads;
    rollout (n, layers, keys): from the classifier's tokens through the layers so far.
    """

    heads: Float[Tensor, "whole layers heads query key"]
    means: Float[Tensor, "n layers query key"]
    rollout: Float[Tensor, "n layers key"]


def require_token_attention(model: Model) -> None:
    """Raise UnsupportedError unless the tokens of one grid attend to each other in all layers, with as many heads each.

    A last layer with one query (class attention, attention pooling) is accepted: it is left out.
    """
    layout = model.anatomy.layout
    sites = survey_weights(model, probe_images(model, 1))
    for site in sites:
        whole = layout is not None and site.keys == site.queries == layout.tokens
        if site.kind != "class" and not (site.kind == "patch" and whole and site.part == 0):
            raise UnsupportedError(
                f"expected layers in which every patch attends to every patch, found {site.module!r} of {model.alias}: "
                f"{KIND_WORDS[site.kind]}{'' if site.part == 0 else ', in several parts'}"
            )
    heads = {site.heads for site in sites if site.kind == "patch"}
    if len(heads) != 1:
        found = f"layers with {', '.join(map(str, sorted(heads)))}" if heads else "none in which patches attend"
        raise UnsupportedError(f"expected layers of one number of heads in {model.alias}, found {found}")


def token_attention(
    model: Model, images: Images, *, whole: int = WHOLE, pool: Callable[[Tensor], Tensor] = lambda weights: weights
) -> TokenAttention:
    """The attention of every layer between all tokens of each image, of every head for the first `whole` images.

    images: (n, 3, height, width) in [0, 1]; pool: what is kept of weights (..., queries, keys) on the CPU, with fewer
    queries where they are many. Rollouts of a model with attention pooling start from the mean over patches. Raises
    UnsupportedError as require_token_attention, InputError for no images.
    """
    require_token_attention(model)
    if not len(images):
        raise InputError("expected at least one image, found none")
    layout, readout = model.layout, model.anatomy.readout
    chosen: Readout = "mean" if readout in (None, "pool") else readout

    def of_batch(batch: Images, whole: int) -> tuple[Tensor, Tensor, Tensor]:
        heads: list[Tensor] = []
        means: list[Tensor] = []

        def take(call: AttentionCall) -> None:
            if call.site.kind != "patch":
                return
            mean, kept = [], []
            with without_autocast(batch.device):
                for part, own in call.parts():
                    weights = precise(own.precise().weights())
                    mean.append(weights.mean(1))
                    kept.append(pool(weights[: max(0, whole - part.start)].cpu()))
            heads.append(torch.cat(kept))
            means.append(torch.cat(mean).float())

        observe(model, batch, take)
        row = readout_row(layout, chosen, batch=len(batch), like=means[0])
        rollouts = rollouts_so_far(reversed(means), row).cpu()
        return torch.stack(heads, 1), torch.stack([pool(mean.cpu()) for mean in means], 1), rollouts

    depth = sum(site.kind == "patch" for site in survey_weights(model, images[:1].to(model.device)))
    size = max(1, _BYTES // (4 * depth * layout.tokens**2))
    batches = ((images[at : at + size].to(model.device), max(0, whole - at)) for at in range(0, len(images), size))
    return TokenAttention(*(torch.cat(each) for each in zip(*(of_batch(*each) for each in batches), strict=True)))

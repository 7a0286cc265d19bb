"""Patch: activations of one run put into another, at each place apart or at several together (activation patching)."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.capture import Captured, capture
from vitlens.lens.intervene import Change, intervene
from vitlens.lens.places import resolve_places
from vitlens.lens.replay import replaying
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, as_images, takes_images
from vitlens.shapes import Logits
from vitlens.summary import Summary


@dataclass(frozen=True, eq=False, repr=False)  # compared by identity: == of tensors is elementwise
class Patched(Summary):
    """The logits of one run with another run's activations put in.

    places: the names that were patched together in each element of logits (places, batch, classes); clean, other: the
    logits (batch, classes) of the two runs; exact: whether replay computed them, not full forward passes (the numbers
    are those of full forward passes, to rounding, in both cases).
    """

    places: tuple[tuple[str, ...], ...]
    logits: Float[Tensor, "places batch classes"]
    clean: Logits
    other: Logits
    exact: bool

    def __getitem__(self, name: str) -> Logits:
        """The logits (batch, classes) of a place that was patched alone. Raises InputError for another."""
        if (name,) not in self.places:
            raise InputError(f"expected a place that was patched alone, found {name!r}; see .places")
        return self.logits[self.places.index((name,))]


@takes_images
def patch(
    model: Model,
    images: AnyImages,
    other: AnyImages | Captured,
    places: str | Sequence[str | tuple[str, ...]],
) -> Patched:
    """The logits of `images` with the activations of the other run put in at some places (activation patching).

    other: images in any form, as many as `images`, or what was captured at these places; places: names or
    patterns, every place they mean patched apart; a tuple of them is patched together. "blocks.*.input[*]" is every
    token of every block. Where the model can be replayed, each run starts at the first layer that it changes, many in
    one batch. Raises InputError for runs of different numbers of images, UnknownNameError for an unknown place.

    >>> import torch, vitlens
    >>> model, images = vitlens.load("vit-digits"), torch.rand(4, 3, 32, 32)
    >>> places = ["blocks.*.head.*", ("blocks.0.attention", "blocks.0.mlp")]
    >>> patched = vitlens.patch(model, images[:2], images[2:], places)
    >>> patched.logits.shape  # 24 heads, and attention and MLP of block 0 together
    torch.Size([25, 2, 10])
    >>> effect = patched["blocks.5.head.0"] - patched.clean
    """
    images = as_images(images).to(model.device)
    labels: list[tuple[str, ...]] = []
    for each in (places,) if isinstance(places, str) else places:
        names = tuple(access.name for access in resolve_places(model, each))
        labels += [(name,) for name in names] if isinstance(each, str) else [names]
    captured = (
        other if isinstance(other, Captured) else capture(model, other, [name for each in labels for name in each])
    )
    if len(captured.logits) != len(images):
        raise InputError(f"expected two runs of as many images, found {len(images)} and {len(captured.logits)}")
    sets: list[dict[str, Change]] = [{name: captured[name].detach() for name in each} for each in labels]
    with suppress(UnsupportedError), replaying(model, images) as replay:
        logits = replay.run(sets)
        return Patched(tuple(labels), logits, replay.logits, captured.logits.detach(), replay.exact)
    with evaluating(model), torch.no_grad():  # no attention
        clean: Tensor = model(images)
        logits = clean.new_empty(len(sets), *clean.shape)
        for number, changes in enumerate(sets):
            with intervene(model, changes):
                logits[number] = model(images)
    return Patched(tuple(labels), logits, clean, captured.logits.detach(), exact=False)

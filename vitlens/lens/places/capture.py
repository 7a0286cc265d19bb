"""Capture: the tensors at chosen places in one forward pass."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.errors import InputError, LensError, UnknownNameError
from vitlens.lens.attention import TensorFunction
from vitlens.lens.places.access import Access
from vitlens.lens.places.patterns import resolve_places, resolve_tokens
from vitlens.lens.places.place import Place
from vitlens.lens.places.touch import Touch, touched
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, Parts, as_images, takes_images
from vitlens.shapes import Logits

_AT_ONCE = 32  # reference images in one forward


@dataclass(frozen=True, eq=False)  # compared by identity: == of tensors is elementwise
class Captured(Mapping[str, Tensor]):
    """The tensors of one forward pass by the names of their places, each (batch, *shape); logits (batch, classes).

    places: what was captured, in forward order of the names that were asked for.
    """

    logits: Logits
    places: tuple[Place, ...]
    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        for known in (name, f"{name}.residual"):
            if known in self.tensors:
                return self.tensors[known]
        raise UnknownNameError("captured place", name, self.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        lines = (f"  {name}: {tuple(tensor.shape)}" for name, tensor in self.tensors.items())
        return "\n".join((f"Captured of {len(self.logits)} images", *lines, f"  logits: {tuple(self.logits.shape)}"))


@takes_images
def capture(
    model: Model,
    images: AnyImages,
    places: str | Sequence[str],
    *,
    rows: str | int | Sequence[int] | None = None,
    graph: bool = False,
) -> Captured:
    """The tensors at some places in one forward pass of the images, in evaluation mode.

    places: names or patterns (`model.places()`); only these are kept. rows: query tokens whose attention weights and
    scores are kept, as positions or "cls", "register", "patch" (None: all); attention stays fused, and the cost is rows
    x keys. graph: every tensor is part of the autograd graph of the logits, which starts at the images; else tensors
    are detached and the logits are those of the uncaptured model, bit for bit (to 1e-5 for nn.MultiheadAttention).
    Inside `intervene`, the tensors are those of the changed model. Raises UnknownNameError for an unknown place,
    InputError for rows that are not there.

    >>> import torch, vitlens
    >>> model = vitlens.load("vit-digits")
    >>> captured = vitlens.capture(model, torch.rand(2, 3, 32, 32), ["blocks.*.residual", "blocks.3.head.1[cls]"])
    >>> captured["blocks.3.residual"].shape, captured["blocks.3.head.1[cls]"].shape
    (torch.Size([2, 65, 128]), torch.Size([2, 1, 32]))
    """
    images = as_images(images).to(model.device)
    chosen = resolve_places(model, places)
    kept: dict[str, Tensor] = {}
    touches = [_keeping(model, access, kept, rows, graph=graph) for access in chosen if access.part != "logits"]
    if graph and not images.requires_grad:
        images = images.detach().requires_grad_()
    with evaluating(model), torch.set_grad_enabled(graph), touched(model, touches):
        logits: Tensor = model(images)
    tensors = {access.name: logits if access.part == "logits" else kept.get(access.name) for access in chosen}
    missing = [name for name, tensor in tensors.items() if tensor is None]
    if missing:
        raise LensError(f"expected a tensor at {missing[0]}, found that the forward pass did not reach it")
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return Captured(logits, tuple(access.place for access in chosen), MappingProxyType(found))


def mean_of(model: Model, images: Parts, chosen: Sequence[Access]) -> dict[str, Tensor]:
    """The mean over images of the tensor at each place, without the batch axis."""
    sums: dict[str, Tensor] = {}

    def adding(access: Access) -> TensorFunction:
        def add(tensor: Tensor) -> Tensor:
            total = tensor.double().sum(0)
            sums[access.name] = sums[access.name] + total if access.name in sums else total
            return tensor

        return add

    touches = [Touch(access, adding(access), reads=True) for access in chosen]
    with evaluating(model), torch.no_grad(), touched(model, touches):
        for batch in images.split(_AT_ONCE):
            model(batch.to(model.device))
    return {name: (total / len(images)).float() for name, total in sums.items()}


def _keeping(
    model: Model, access: Access, kept: dict[str, Tensor], rows: str | int | Sequence[int] | None, *, graph: bool
) -> Touch:
    chosen = None
    if rows is not None and access.place.kind in ("scores", "weights"):
        queries = access.place.shape[access.place.axes.index("query")]
        if queries > 1:  # a class-attention layer has one query, whose row is returned
            chosen = resolve_tokens(model, rows, queries)

    def keep(tensor: Tensor) -> Tensor:
        kept[access.name] = tensor if graph else tensor.detach()
        return tensor

    if graph and chosen is not None:
        raise InputError("expected either rows or graph=True, found both; take the rows of the captured weights")
    return Touch(access, keep, reads=not graph, rows=chosen)

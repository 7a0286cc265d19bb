"""Capture: tensors of a forward pass kept, averaged over images, or handed to a reducer as they are
computed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.errors import InputError, LensError, UnknownNameError
from vitlens.inputs import takes_images
from vitlens.lens import observe as observing
from vitlens.lens.call import AttentionCall
from vitlens.lens.change import PlaceChange, in_force, reading
from vitlens.lens.place_patterns import Tokens as Positions
from vitlens.lens.place_patterns import resolve_places, resolve_tokens
from vitlens.lens.places import Access, Place
from vitlens.lens.site import Site
from vitlens.lens.trace import depth
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, Parts, as_images
from vitlens.shapes import Images, Logits

_AT_ONCE = 32  # reference images in one forward


@dataclass(frozen=True, eq=False)  # compared by identity: == of tensors is elementwise
class Captured(Mapping[str, Tensor]):
    """The tensors of one forward pass by the names of their places, each (batch, *shape); logits
    (batch, classes).

    places: the captured places, in the order of the requested names.
    """

    logits: Logits
    places: tuple[Place, ...]
    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        for full_name in (name, f"{name}.residual"):
            if full_name in self.tensors:
                return self.tensors[full_name]
        raise UnknownNameError("captured place", name, self.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        lines = (f"  {name}: {tuple(tensor.shape)}" for name, tensor in self.tensors.items())
        return "\n".join(
            (
                f"Captured of {len(self.logits)} images",
                *lines,
                f"  logits: {tuple(self.logits.shape)}",
            )
        )


@takes_images
def capture(
    model: Model,
    images: AnyImages,
    places: str | Sequence[str],
    *,
    rows: Positions | None = None,
    graph: bool = False,
) -> Captured:
    """Return the tensors at some places in one forward pass of the images, in evaluation mode.

    places: names or patterns (`model.places()`); only these are kept.
    rows: query tokens whose attention weights and scores are kept, as positions or "cls",
        "register", "patch" (None: all); attention stays fused, and the cost is rows x keys.
    graph: every tensor is part of the autograd graph of the logits, which starts at the images;
        else tensors are detached and the logits are those of the uncaptured model, bit for bit (to
        1e-5 for nn.MultiheadAttention). Inside `intervene`, the tensors are those of the changed
        model.

    Raises UnknownNameError for an unknown place, InputError for rows that are not there.

    >>> import torch, vitlens
    >>> model = vitlens.load("vit-digits")
    >>> places = ["blocks.*.residual", "blocks.3.head.1[cls]"]
    >>> captured = vitlens.capture(model, torch.rand(2, 3, 32, 32), places)
    >>> captured["blocks.3.residual"].shape, captured["blocks.3.head.1[cls]"].shape
    (torch.Size([2, 65, 128]), torch.Size([2, 1, 32]))
    """
    images = as_images(images).to(model.device)
    chosen = resolve_places(model, places)
    recorded: dict[str, Tensor] = {}

    def record(name: str, tensor: Tensor) -> Tensor:
        recorded[name] = tensor if graph else tensor.detach()
        return tensor

    changes = []
    for access in chosen:
        if access.part == "logits":
            continue
        change = PlaceChange(access, function=partial(record, access.name), reads=not graph)
        # a class-attention layer has one query, whose row is returned
        if rows is not None and access.part in ("scores", "weights") and access.place.shape[-2] > 1:
            change = replace(change, rows=resolve_tokens(model, rows, access.place.shape[-2]))
            if graph:
                raise InputError(
                    "expected either rows or graph=True, found both; take the rows of the captured "
                    "weights"
                )
        changes.append(change)
    if graph and not images.requires_grad:
        images = images.detach().requires_grad_()
    with evaluating(model), torch.set_grad_enabled(graph), in_force(model, changes):
        logits: Tensor = model(images)
    tensors: dict[str, Tensor] = {}
    for access in chosen:
        if access.part == "logits":
            tensors[access.name] = logits
        elif access.name in recorded:
            tensors[access.name] = recorded[access.name]
        else:
            raise LensError(
                f"expected a tensor at {access.name}, found that the forward pass did not reach it"
            )
    return Captured(logits, tuple(access.place for access in chosen), MappingProxyType(tensors))


class Means:
    """Running means over images of the tensors at some places.

    Memory does not grow with the images.

    images: the number of images added.
    sums: float64, on the CPU, by place.
    """

    def __init__(self) -> None:
        self.images = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the tensor (batch, *shape) of a place."""
        axes = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)  # heads are a view
        original_order = [axes.index(axis) for axis in range(1, tensor.dim())]
        # of a model in 16 bits
        wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        mean = wide.permute(0, *axes).mean(0)
        total = (mean * len(tensor)).cpu().double().permute(original_order)
        if name in self.sums:
            total = self.sums[name] + total
        self.sums[name] = total

    def of(self, name: str) -> Tensor:
        """Return the mean at a place, without the batch axis."""
        return (self.sums[name] / self.images).float()


def means(model: Model, images: Parts, chosen: Sequence[Access]) -> dict[str, Tensor]:
    """Return the mean over images of the tensor at each place, without the batch axis."""
    running = Means()
    with evaluating(model), torch.no_grad(), reading(model, chosen, running.add):
        for batch in images.split(_AT_ONCE):
            model(batch.to(model.device))
            running.images += len(batch)
    return {access.name: running.of(access.name) for access in chosen}


@takes_images
def observe(
    model: Model,
    images: AnyImages,
    reducer: Callable[[AttentionCall], None],
    *,
    explicit: bool = False,
    graph: bool = False,
) -> Logits:
    """Return the logits of the images, and hand each layer's attention to the reducer as it is
    computed.

    reducer: called with an AttentionCall for every attention layer, in forward order: `call.site`
        says which layer it is and what attends to what, `call.weights()` gives the weights (batch,
        heads, query, key), in a windowed layer (images x windows, heads, query, key),
        `call.rows([0])` those of some query rows alone, `call.inputs` queries, keys and values
        where the model uses scaled dot-product attention, `call.output` each head's output. Memory
        does not grow with the number of layers.
    explicit: the weights are in the autograd graph of the logits.
    graph: that graph starts at the images, and attention stays fused.

    The logits are those of the unobserved model, bit for bit (to 1e-5 for nn.MultiheadAttention).
    The first time a model is observed, the lens checks itself on one image. Raises UnsupportedError
    where there is no softmax attention, LensError where some of it would be missed.

    >>> import torch, vitlens
    >>> entropies = []
    >>> def reducer(call):
    ...     weights = call.weights()
    ...     entropies.append(torch.special.entr(weights).sum(-1).mean((0, 2)))
    >>> logits = vitlens.observe(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32), reducer)
    >>> torch.stack(entropies).shape  # nats, by layer and head
    torch.Size([6, 4])
    """
    return observing.observe(
        model, as_images(images).to(model.device), reducer, explicit=explicit, graph=graph
    )


@dataclass(frozen=True)
class CapturedAttention:
    """logits (batch, classes); sites: one per call; layers: weights (batch, heads, query, key), or
    the given rows, by the number of the layer; those of a block without attention are (batch, 0, 0,
    0).
    """

    logits: Tensor
    sites: tuple[Site, ...]
    layers: tuple[Tensor, ...]


def capture_attention(
    model: Model, images: Images, *, rows: Sequence[int] | None = None, explicit: bool = False
) -> CapturedAttention:
    """Return the attention weights of every layer, or of some query rows only, kept in memory.

    rows: positions of query tokens, (0,) for CLS; the cost and memory are then rows x keys. A
        class-attention layer has one query and returns its row.
    explicit: weights stay in the autograd graph.
    """
    sites: list[Site] = []
    layers: list[Tensor] = []

    def add_blocks_without_attention(numbers: range) -> None:
        layers.extend(images.new_zeros(len(images), 0, 0, 0) for _ in numbers)

    def record(call: AttentionCall) -> None:
        previous = sites[-1].layer if sites else -1
        add_blocks_without_attention(range(previous + 1, call.site.layer))
        sites.append(call.site)
        if rows is None or call.site.queries <= max(rows):
            layers.append(call.weights())
        else:
            layers.append(call.rows(rows))

    logits = observing.observe(model, images, record, explicit=explicit)
    add_blocks_without_attention(range(sites[-1].layer + 1, depth(model)))
    return CapturedAttention(logits, tuple(sites), tuple(layers))

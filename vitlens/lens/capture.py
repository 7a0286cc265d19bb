"""Capture tensors of a forward pass, average them over images, or hand them to a reducer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.errors import InputError, LensError, UnknownNameError, UnsupportedError
from vitlens.inputs import takes_images
from vitlens.lens import observe as observing
from vitlens.lens.access import Access, Place
from vitlens.lens.call import AttentionCall
from vitlens.lens.change import PlaceChange, in_force, reading
from vitlens.lens.place_patterns import Tokens as Positions
from vitlens.lens.place_patterns import resolve_places, resolve_tokens
from vitlens.lens.site import Site
from vitlens.lens.trace import depth
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, Parts, as_images
from vitlens.shapes import Images, Logits

_AT_ONCE = 32  # reference images in one forward pass


@dataclass(frozen=True, eq=False)  # compared by identity: == of tensors is elementwise
class Captured(Mapping[str, Tensor]):
    """The tensors of one forward pass by the names of their places.

    logits: the logits (batch, classes).
    places: the captured places, in the order of the requested names.
    tensors: the tensors by the name of the place, each of shape (batch, *shape).
    """

    logits: Logits
    places: tuple[Place, ...]
    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        for full_name in (name, f"{name}.residual"):  # "blocks.3" of a transformer is its stream
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

    Inside `intervene`, the tensors are those of the changed model. Raises UnknownNameError for an
    unknown place, InputError for rows that do not exist.

    places: names or patterns (`model.places()`); only their tensors are kept.
    rows: the query tokens of which attention weights and scores are kept, as positions or as
        "cls", "register" or "patch"; None means all. Attention stays fused, and the cost is
        rows x keys.
    graph: make every tensor part of the autograd graph of the logits, which starts at the images.
        Otherwise tensors are detached, and the logits are those of the uncaptured model, bit for
        bit (to 1e-5 for nn.MultiheadAttention).

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
        if rows is not None and access.part in ("scores", "weights"):
            queries = access.place.shape[-2]
            if queries > 1:  # the only row of a class-attention layer is always returned
                change = replace(change, rows=resolve_tokens(model, rows, queries))
            if graph and queries > 1:
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

    Memory does not grow with the number of images.

    images: the number of images added so far.
    sums: the sum over images by place, in float64 on the CPU.
    """

    def __init__(self) -> None:
        self.images = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the tensor (batch, *shape) of a place."""
        # Heads are a transposed view of their tensor. With the axes in the order of memory, the
        # mean over the batch reads the memory from start to end.
        memory_order = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
        original_order = [memory_order.index(axis) for axis in range(1, tensor.dim())]
        # a sum in 16 bits would lose precision
        wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        mean = wide.permute(0, *memory_order).mean(0)
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
    """Return the logits of the images, and hand each layer's attention to the reducer.

    The reducer is called with an AttentionCall for every attention layer, in forward order:

    - `call.site` describes the layer and what attends to what.
    - `call.weights()` returns the weights (batch, heads, query, key). In a windowed layer, the
      first axis is images x windows.
    - `call.rows([0])` returns the weights of some query rows only.
    - `call.inputs` has queries, keys and values if the model uses scaled dot-product attention.
    - `call.output` is the output of each head.

    Memory does not grow with the number of layers. The logits are those of the unobserved model,
    bit for bit (to 1e-5 for nn.MultiheadAttention). The first time a model is observed, the lens
    checks itself on one image. Raises UnsupportedError for a model without softmax attention,
    LensError if some of its attention would be missed.

    reducer: the function that is called for every attention layer.
    explicit: make the weights part of the autograd graph of the logits.
    graph: start that graph at the images; attention stays fused.

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
    """The attention weights of every layer, kept in memory.

    logits: the logits (batch, classes).
    sites: the site of each attention call.
    layers: the weights (batch, heads, query, key) by the number of the layer, or only the requested
        rows. A block without attention has weights of shape (batch, 0, 0, 0). A layer with several
        attention calls has the heads of all of them, in their order.
    """

    logits: Tensor
    sites: tuple[Site, ...]
    layers: tuple[Tensor, ...]


def capture_attention(
    model: Model, images: Images, *, rows: Sequence[int] | None = None, explicit: bool = False
) -> CapturedAttention:
    """Return the attention weights of every layer, or of some query rows only, kept in memory.

    rows: positions of query tokens, (0,) for CLS. Cost and memory are then rows x keys. A
        class-attention layer has only one query and returns its row.
    explicit: keep the weights in the autograd graph.

    Raises UnsupportedError if the calls of a layer differ in their numbers of queries or keys.
    """
    sites: list[Site] = []
    layers: list[Tensor] = []

    def add_blocks_without_attention(numbers: range) -> None:
        layers.extend(images.new_zeros(len(images), 0, 0, 0) for _ in numbers)

    def record(call: AttentionCall) -> None:
        previous = sites[-1].layer if sites else -1
        add_blocks_without_attention(range(previous + 1, call.site.layer))
        sites.append(call.site)
        if rows is None or call.site.queries <= max(rows):  # a layer with too few queries
            weights = call.weights()
        else:
            weights = call.rows(rows)
        if call.site.part == 0:
            layers.append(weights)
        else:
            layers[-1] = _with_further_heads(layers[-1], weights, call.site)

    logits = observing.observe(model, images, record, explicit=explicit)
    add_blocks_without_attention(range(sites[-1].layer + 1, depth(model)))
    return CapturedAttention(logits, tuple(sites), tuple(layers))


def _with_further_heads(layer: Tensor, weights: Tensor, site: Site) -> Tensor:
    """Return the weights of a layer's calls so far, joined with those of its next call.

    site: that of the next call. Raises UnsupportedError unless only the numbers of heads differ.
    """
    if (layer.shape[0], *layer.shape[2:]) != (weights.shape[0], *weights.shape[2:]):
        raise UnsupportedError(
            f"expected attention calls of one shape in layer {site.layer} ({site.module}), found "
            f"{layer.shape[2]} queries and {layer.shape[3]} keys, then {weights.shape[2]} and "
            f"{weights.shape[3]}"
        )
    return torch.cat((layer, weights), dim=1)

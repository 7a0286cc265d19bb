"""The lens as vitlens.observe and vitlens.replay: images are checked, and moved to the model's device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vitlens.lens import observe as observing
from vitlens.lens.call import AttentionCall
from vitlens.lens.replay import DEFAULT_BUDGET, Replay, replaying
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, as_images, takes_images
from vitlens.shapes import Logits


@takes_images
def observe(
    model: Model,
    images: AnyImages,
    reducer: Callable[[AttentionCall], None],
    *,
    explicit: bool = False,
    graph: bool = False,
) -> Logits:
    """The logits of the images; each layer's attention is handed to the reducer as it is computed, and then released.

    reducer: called with an AttentionCall for every attention layer, in forward order: `call.site` says which layer it
    is and what attends to what, `call.weights()` gives the weights (batch, heads, query, key), in a windowed layer
    (images x windows, heads, query, key), `call.rows([0])` those of some query rows alone, `call.inputs` queries, keys
    and values where the model uses scaled dot-product attention, `call.output` each head's output. Memory does not
    grow with the number of layers. explicit: the weights are in the autograd graph of the logits; graph: that graph
    starts at the images, and attention stays fused. The logits are those of the unobserved model, bit for bit (to 1e-5
    for nn.MultiheadAttention). The first time a model is observed, the lens checks itself on one image. Raises
    UnsupportedError where there is no softmax attention, LensError where some of it would be missed.

    >>> import torch, vitlens
    >>> entropies = []
    >>> def reducer(call):
    ...     weights = call.weights()
    ...     entropies.append(torch.special.entr(weights).sum(-1).mean((0, 2)))
    >>> logits = vitlens.observe(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32), reducer)
    >>> torch.stack(entropies).shape  # nats, by layer and head
    torch.Size([6, 4])
    """
    return observing.observe(model, as_images(images).to(model.device), reducer, explicit=explicit, graph=graph)


@takes_images
@contextmanager
def replay(
    model: Model, images: AnyImages, *, budget: int = DEFAULT_BUDGET, chunk: int | None = None
) -> Iterator[Replay]:
    """A clean pass of the images, kept inside the context, from which many changes are run.

    `replay.run([{place: change}, ...])` gives the logits (sets, batch, classes) under each set of changes, which are
    those of `intervene`: the model runs again only from the first layer that a set changes, several sets in one batch.
    `replay.logits` are those of the clean pass; `replay.exact`: whether the model can be started in the middle with
    equal logits (1e-4, tested once per model), else every set is a full forward pass, and `replay.note` says why.
    budget: bytes of activations that are kept, the rest is computed again; chunk: images in one forward, copies
    counted. No gradients. Contexts of `intervene` around it stay applied. Raises UnsupportedError for a model without
    attention.

    >>> import torch, vitlens
    >>> model, images = vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32)
    >>> with vitlens.replay(model, images) as replay:
    ...     logits = replay.run([{f"blocks.5.head.{head}": "zero"} for head in range(4)] + [{"blocks.0": "remove"}])
    >>> logits.shape, replay.exact
    (torch.Size([5, 2, 10]), True)
    """
    with replaying(model, as_images(images).to(model.device), budget=budget, chunk=chunk) as kept:
        yield kept

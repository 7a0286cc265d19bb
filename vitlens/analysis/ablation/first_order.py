"""The first-order estimate of the effect of each head: gradient times change of output, from one backward pass."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.ablation.bench import Bench, ByImage
from vitlens.analysis.ablation.units import Unit
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.devices import evaluating
from vitlens.lens.attention import Tap, TensorFunction, tapped
from vitlens.lens.layers import Layer, layer_of
from vitlens.models.model import Model
from vitlens.shapes import Heads, Images, Labels

GRAPH = 4  # divides the batch size, as a backward pass keeps the activations of all layers


def first_order(bench: Bench, units: Sequence[Unit]) -> ByImage:
    """Each image's gradient of the cross-entropy with respect to a head's output · (replacement - output), nats.

    (units, images), signed, float64 on the CPU; NaN for MLPs and blocks. With "zero" this is the estimate of Michel
    2019 before the absolute value.
    """
    own, rows = bench.share(), {unit: row for row, unit in enumerate(units) if unit.kind == "head"}
    result = torch.full((len(units), len(own)), torch.nan, dtype=torch.float64)
    size = max(1, fitting_batch_size(bench.model) // GRAPH)
    for start in range(0, len(own) if rows else 0, bench.size):
        batch = own[start : start + bench.size]
        images, labels = (each[batch].to(bench.model.device) for each in (bench.images, bench.labels))
        with bench.source(batch, tuple(rows)) as source:
            replacements = source.tensors(tuple(rows))
        for first in range(0, len(batch), size):
            part = slice(first, first + size)
            where = slice(start + first, min(start + first + size, start + len(batch)))
            outputs = head_gradients(bench.model, images[part], labels[part], {unit.layer for unit in rows})
            for unit, row in rows.items():
                tensor = replacements.get(unit.intervention(source.by))
                result[row, where] = gradient_times_change(
                    outputs, unit, tensor[part] if tensor is not None and tensor.dim() == 3 else tensor
                )
    return bench.processes.gathered(result.T.contiguous()).T


def gradient_times_change(
    outputs: Mapping[int, tuple[Heads, Heads]], unit: Unit, replacement: Tensor | None
) -> Float[Tensor, " batch"]:
    """Gradient · (replacement - output) of one head, float64 on the CPU; replacement: None is zero."""
    output, gradient = (heads[:, unit.head] for heads in outputs[unit.layer])  # (batch, tokens, head_dim)
    new = 0.0 if replacement is None else replacement.to(output)
    return (gradient * (new - output)).flatten(1).cpu().double().sum(1)


def head_gradients(model: Model, images: Images, labels: Labels, which: set[int]) -> dict[int, tuple[Heads, Heads]]:
    """By layer: each head's output before the output projection, and the gradient of each image's loss at it."""
    read: dict[int, Tensor] = {}
    with torch.enable_grad(), evaluating(model), _reading(model, which, read):
        loss = F.cross_entropy(model(images), labels, reduction="sum")  # each image's gradient is that of its own loss
    gradients = torch.autograd.grad(loss, list(read.values()), allow_unused=True, materialize_grads=True)
    return {
        index: (_by_head(tensor.detach(), layer_of(model, index)), _by_head(gradient, layer_of(model, index)))
        for (index, tensor), gradient in zip(read.items(), gradients)
    }


@contextmanager
def _reading(model: Model, which: set[int], read: dict[int, Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for index in sorted(which):
            module = layer_of(model, index).attention
            stack.enter_context(tapped(model, Tap((module,), joined=_keep_leaf(read, index))))
        yield


def _keep_leaf(read: dict[int, Tensor], index: int) -> TensorFunction:
    def joined(heads: Tensor) -> Tensor:
        read[index] = heads if heads.requires_grad else heads.detach().requires_grad_()
        return read[index]

    return joined


def _by_head(joined: Tensor, layer: Layer) -> Heads:
    per_image = joined.unflatten(0, (-1, layer.windows)).flatten(1, 2)  # (batch, tokens, heads x head_dim)
    heads: Tensor = per_image.unflatten(-1, (layer.heads, layer.head_dim)).transpose(1, 2)
    return heads

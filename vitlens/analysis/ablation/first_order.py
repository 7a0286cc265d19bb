"""The first-order estimate of the effect of each head: gradient times change of output, from one backward pass."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.ablation.bench import Bench, ByImage
from vitlens.analysis.ablation.units import Unit
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.lens.capture import capture
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels

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
            changes = source.changes([tuple(rows)])[0]
        for first in range(0, len(batch), size):
            part = slice(first, first + size)
            where = slice(start + first, min(start + first + size, start + len(batch)))
            outputs = head_gradients(bench.model, images[part], labels[part], {unit.layer for unit in rows})
            for unit, row in rows.items():
                output, gradient = (heads.select(-3, unit.head or 0) for heads in outputs[unit.layer])
                new = changes[unit.place]
                if isinstance(new, Tensor):
                    change = (new[part] if new.dim() == output.dim() else new).to(output) - output
                else:  # zero
                    change = 0.0 - output
                result[row, where] = (gradient * change).flatten(1).cpu().double().sum(1)
    return bench.processes.gathered(result.T.contiguous()).T


def head_gradients(model: Model, images: Images, labels: Labels, which: set[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer: each head's output before the output projection, and the gradient of each image's loss at it.

    Both (batch, heads, tokens, head_dim), with windows after the batch where there are windows.
    """
    captured = capture(model, images, [f"blocks.{index}.heads" for index in sorted(which)], graph=True)
    # each image's gradient is that of its own loss
    loss = F.cross_entropy(captured.logits, labels, reduction="sum")
    outputs = list(captured.values())
    gradients = torch.autograd.grad(loss, outputs, allow_unused=True, materialize_grads=True)
    return {index: (each.detach(), own) for index, each, own in zip(sorted(which), outputs, gradients)}

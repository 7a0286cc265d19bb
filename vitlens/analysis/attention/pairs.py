"""Queries and keys of every token, from which scores of pairs are computed later."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.errors import UnsupportedError
from vitlens.lens.call import AttentionCall
from vitlens.lens.observe import observe
from vitlens.models.model import Model
from vitlens.shapes import Images


@dataclass(frozen=True)
class QueriesKeys:
    """Queries and keys of the first n images in the last layers, in float16 on the CPU.

    scales: the factor of the products of queries and keys in each layer.
    """

    queries: Float[Tensor, "n layers heads token head_dim"]
    keys: Float[Tensor, "n layers heads token head_dim"]
    scales: tuple[float, ...]


def queries_and_keys(model: Model, images: Images, *, most: int) -> QueriesKeys:
    """Return queries and keys of as many first images as fit into `most` numbers.

    If those of one image do not fit, only its last layers are returned.

    images (n, 3, height, width): images in [0, 1].

    Raises UnsupportedError for layers with scores that are not only products of queries and keys.
    Also raises it without attention over the whole image, and if one layer does not fit.
    """
    first = _of_images(model, images[:1])
    layers = first.queries.shape[1]
    size_of_layer = 2 * first.queries[:, 0].numel()  # the keys have the size of the queries
    if size_of_layer > most:
        raise UnsupportedError(
            f"expected at most {most:,} numbers in the queries and keys of a layer of "
            f"{model.alias}, found {size_of_layer:,}"
        )
    count = most // (size_of_layer * layers)
    if count > 1 and len(images) > 1:
        return _of_images(model, images[:count])
    last = min(layers, most // size_of_layer)
    return QueriesKeys(
        queries=first.queries[:, -last:],
        keys=first.keys[:, -last:],
        scales=first.scales[-last:],
    )


def _of_images(model: Model, images: Images) -> QueriesKeys:
    """Return the queries and keys of all layers on these images."""
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    scales: list[float] = []

    def take(call: AttentionCall) -> None:
        """Add one layer; called for each attention call of the pass."""
        if call.site.kind != "patch":
            return
        inputs = call.inputs
        if inputs is None or inputs.bias is not None:
            term = "a bias" if inputs is not None else "weights that the layer computes itself"
            raise UnsupportedError(
                "expected scores that are products of queries and keys only, found "
                f"{term} in {call.site.module!r} of {model.alias}"
            )
        queries.append(inputs.query.detach().half().cpu())
        keys.append(inputs.key.detach().half().cpu())
        scales.append(inputs.scale)

    observe(model, images.to(model.device), take)
    if not queries:
        raise UnsupportedError(
            f"expected attention of patches over the whole image, found none in {model.alias}"
        )
    return QueriesKeys(
        queries=torch.stack(queries, 1), keys=torch.stack(keys, 1), scales=tuple(scales)
    )

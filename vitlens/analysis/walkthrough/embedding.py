"""From pixels to tokens: the patch embedding, as the model's convolution and as a linear map of each patch."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.lens.capture import capture
from vitlens.models.hooks import Arguments, watching
from vitlens.models.model import Model
from vitlens.shapes import Images


@dataclass(frozen=True)
class Embedding:
    """The patch embedding of some images. values: 3 x patch height x patch width, channel by channel, normalised.

    patches: the pixels of each patch, row by row; filters: the convolution's weights; embedded: patches · filters +
    bias, by hand; convolved: the convolution's own output.
    """

    patches: Float[Tensor, "batch patches values"]
    filters: Float[Tensor, "dim values"]
    embedded: Float[Tensor, "batch patches dim"]
    convolved: Float[Tensor, "batch patches dim"]


def patch_embedding(model: Model, images: Images) -> Embedding | None:
    """The patch embedding as unfold and a linear map; None for a model whose patches are not cut by one convolution."""
    name = _convolution(model)
    if name is None:
        return None
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_name: str, arguments: Arguments, output: Any) -> None:
        seen.append((arguments[0], output))

    with watching(model.module, [name], keep):
        model(images)
    if len(seen) != 1:
        return None
    (pixels, output), convolution = seen[0], model.module.get_submodule(name)
    assert isinstance(convolution, nn.Conv2d)
    size: Any = convolution.kernel_size
    patches = F.unfold(pixels, size, stride=size).transpose(1, 2)  # (batch, patches, 3 x height x width)
    filters = convolution.weight.flatten(1)
    embedded = patches @ filters.T
    if convolution.bias is not None:
        embedded = embedded + convolution.bias
    return Embedding(patches, filters, embedded, output.flatten(2).transpose(1, 2))


def _convolution(model: Model) -> str | None:
    """The name of the convolution whose stride is its kernel, the size of a patch, and which reads three channels."""
    size = model.layout.patch_size
    for name, module in model.module.named_modules():
        if (
            isinstance(module, nn.Conv2d)
            and module.kernel_size == module.stride == size
            and (module.in_channels, module.groups, module.dilation) == (3, 1, (1, 1))
            and module.padding in (0, (0, 0), "valid")
        ):
            return str(name)
    return None


def added_positions(
    model: Model, embedding: Embedding, tokens: Float[Tensor, "batch patches dim"]
) -> tuple[Float[Tensor, "patches dim"], float]:
    """What is added to the embeddings of the patches, and by how much another image's differs from it at most.

    tokens: the patches before the first block. Position embeddings do not depend on the image, so the difference is
    rounding; where there is a norm before the first block it is not.
    """
    added = (tokens - embedding.convolved)[0]
    other = torch.zeros(1, 3, *model.input_size, device=model.device)
    again = patch_embedding(model, other)
    assert again is not None  # as the model has one
    difference = capture(model, other, "patches")["patches"] - again.convolved - added
    return added, float(difference.abs().max())

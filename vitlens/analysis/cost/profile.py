"""Cost of a model: parameters and FLOPs by part, memory of its activations, latency."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitlens.analysis.cost.flops import flops_by_part, parameters_by_part, vit_flops
from vitlens.analysis.cost.passes import Latency, inference_peak, latencies, saved_for_training
from vitlens.errors import InputError, LensError
from vitlens.lens.trace import probe_images, trace
from vitlens.models.model import Model, require_model
from vitlens.models.vit import VisionTransformer
from vitlens.summary import Summary

_TRAINED = 2  # images in the measured training step: batch norm needs more than one


@dataclass(frozen=True, repr=False)
class Profile(Summary):
    """The cost of a model at its image size.

    The names of the parts are the keys of `vitlens.analysis.cost.flops.PARTS`.

    parameters: the number of parameters of each part.
    flops: the FLOPs of each part for one image. A multiplication with its addition counts as 2.
    by_formula: True if a formula gives the same FLOPs.
    tokens: the number of tokens, see `tokens_of`.
    training_bytes: the bytes per image that autograd saves for a training step.
    inference_bytes: the peak memory of tensors in a forward pass of one image.
    latencies: the time of a pass for each batch size.
    """

    parameters: Mapping[str, int]
    flops: Mapping[str, int]
    by_formula: bool
    tokens: int
    training_bytes: int
    inference_bytes: int
    latencies: tuple[Latency, ...] = ()


def profile(
    model: Model, *, batch_sizes: Sequence[int] = (1, 8), precision: str = "fp32"
) -> Profile:
    """Return the cost of a model, measured with random pixels on its device.

    The cost does not depend on the values of the weights. Raises LensError if counter and formula
    do not agree on our ViT.

    >>> import vitlens
    >>> cost = vitlens.profile(vitlens.load("vit-digits"), batch_sizes=[1])
    >>> sum(cost.parameters.values())
    1205898
    >>> cost.flops["attention products"]  # 6 blocks of 4 N² d, with N = 65 tokens of width d = 128
    12979200
    """
    require_model(model)
    if not isinstance(batch_sizes, Sequence):  # an untyped call
        raise InputError(
            f"expected several batch sizes, found {batch_sizes!r}; e.g. batch_sizes=[1, 8]"
        )
    images = probe_images(model, _TRAINED)
    flops = flops_by_part(model)
    (timed,) = latencies([model], batch_sizes, precision=precision)
    return Profile(
        parameters=parameters_by_part(model),
        flops=flops,
        by_formula=agrees_with_formula(model, flops),
        tokens=tokens_of(model),
        training_bytes=saved_for_training(model, images, precision=precision) // _TRAINED,
        inference_bytes=inference_peak(model, images[:1].clone(), precision=precision),
        latencies=tuple(batch.latency for batch in timed),
    )


def agrees_with_formula(model: Model, flops: Mapping[str, int]) -> bool:
    """Return True if the counted FLOPs equal those of the formula, False without a formula.

    Only our ViT has a formula. Raises LensError if the numbers differ.
    """
    module = model.module
    if not isinstance(module, VisionTransformer) or model.architecture["pruned"]:
        return False
    if module.config.image_size != model.input_size:
        return False  # positions are resized: the formula would use another number of tokens
    expected = vit_flops(module.config)
    if expected != dict(flops):
        raise LensError(
            f"expected {expected} FLOPs of {model.alias} by formula, counted {dict(flops)}"
        )
    return True


def tokens_of(model: Model) -> int:
    """Return the number of tokens of a model's sequence, prefix included.

    For a model without a sequence, return the number of positions of its first block; for one
    without blocks, the number of pixels.
    """
    if model.anatomy.layout is not None:
        return model.anatomy.layout.tokens
    blocks = model.anatomy.blocks_with_attention
    if not blocks:
        height, width = model.input_size
        return height * width
    first_call = trace(model, 1).by_module[blocks[0]][0]
    shape = first_call.arguments[0].shape[1:]  # of the input of the first block
    if len(shape) != 3:  # as (tokens, dim)
        return shape[0]
    # Windowed models have (height, width, channels), CNNs (channels, height, width). Other models
    # have channels last if only their first two sizes are equal.
    has_channels_last = shape[0] == shape[1] and shape[1] != shape[2]
    if model.anatomy.family == "windowed" or has_channels_last:
        return shape[0] * shape[1]
    return shape[1] * shape[2]

"""Observe: run a model once and hand each layer's attention to a reducer.

Before the first run, the lens checks itself on one image (`survey`). For analyses that read
weights, `survey_weights` also checks that they mix the values.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import LensError, NonFiniteError, UnsupportedError
from vitlens.lens.attention import SITES, AttentionMode, tapped
from vitlens.lens.call import AttentionCall
from vitlens.lens.one_softmax import require_one_softmax
from vitlens.lens.site import Site
from vitlens.lens.tap import Tap
from vitlens.models.memo import once_per_model
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits

Reducer = Callable[[AttentionCall], None]
# largest difference of two sketches of one image, as a share of their spread over heads and
# queries; rounding stays below it
_LARGEST_SHARE: Final = 0.1
_TOLERANCE: Final = 1e-4  # of weights @ value, compared with the output of the model's kernel, fp32
_ROUNDING_STEPS: Final = 4  # tolerance of 16-bit modules in units of the type's epsilon
_SKETCH_SEED: Final = 0
_OTHER_IMAGE_SEED: Final = 2  # not that of the probe images, which must differ


def observe(
    model: Model, images: Images, reducer: Reducer, *, explicit: bool = False, graph: bool = False
) -> Logits:
    """Run `vitlens.observe` on images on the model's device, which need not lie in [0, 1]."""
    survey_weights(model, images)
    with (
        evaluating(model),
        torch.set_grad_enabled(explicit or graph),
        observing(model, reducer, explicit=explicit) as mode,
    ):
        if graph and not images.requires_grad:
            images = images.detach().requires_grad_()
        logits: Tensor = model(images)
        mode.require_all_read()
    return logits


@contextmanager
def observing(
    model: Model | nn.Module, reducer: Reducer, *, explicit: bool = False
) -> Iterator[AttentionMode]:
    """Hand every attention call to the reducer, in the order of the forward pass.

    No tensor is kept.
    """
    if isinstance(model, Model) and not model.anatomy.attention and model.anatomy.unread:
        raise UnsupportedError(
            f"expected softmax attention in {model.alias}, {model.anatomy.unread}"
        )
    with tapped(model, Tap(read=lambda call, _scores: reducer(call), explicit=explicit)) as mode:
        yield mode


def survey(model: Model, images: Images) -> tuple[Site, ...]:
    """Return where a model computes attention, layer by layer, once per model.

    The lens checks itself on the first of the images:

    - Weights @ value is the output of the model's kernel (to 1e-4).
    - Rows of weights sum to 1.
    - The weights of every attention module are observed.
    - The logits are those of the unobserved model.
    - The weights of an image are the same with another image in its batch. Otherwise, the first
      axis would not be the batch.

    On the meta device, which has no values, only the third is checked. The tolerances of a module
    in bf16 or fp16 are those of its rounding. Raises LensError if a check fails.
    """
    return SITES.get(model, lambda: _surveyed(model, images[:1]))


@once_per_model
def survey_weights(model: Model, images: Images) -> tuple[Site, ...]:
    """Return the sites of `survey` for analyses that read weights.

    Raises also UnsupportedError unless these weights mix the values.
    """
    sites = survey(model, images)
    require_one_softmax(model, images)
    return sites


def _surveyed(model: Model, image: Images) -> tuple[Site, ...]:
    """Run the model on one image with the checks of `survey`, and return its sites."""
    tolerance = max(_TOLERANCE, _ROUNDING_STEPS * torch.finfo(model.mean.dtype).eps)
    # the callbacks below fill these during the pass; they are checked after it
    sketches: list[Tensor] = []
    windowed_calls: list[AttentionCall] = []

    def check(call: AttentionCall) -> None:
        if image.is_meta:
            return
        _check_call(call, tolerance)
        sketches.append(_sketch(call))
        if call.output is not None and len(call.output) > call.images:
            windowed_calls.append(call)

    projected: dict[str, Tensor] = {}  # the input of the output projection, by module
    taps = []
    for part in model.anatomy.attention or ():
        if part.projection is not None and not image.is_meta:
            store = partial(_store, projected, part.module)
            taps.append(Tap(modules={part.module}, joined=store))
    with evaluating(model), torch.no_grad(), exact(image.device):
        with observing(model, check) as mode, tapped(model, *taps):
            observed = model(image)
            mode.require_all_read()
        sites = tuple(mode.sites)
        if image.is_meta:
            return sites
        for call in windowed_calls:
            if call.site.module in projected:
                _check_windows(call, projected[call.site.module], tolerance)
        plain = model(image)
        if not torch.isfinite(plain).all():
            raise NonFiniteError(
                f"expected finite logits of {model.alias}, found NaN or infinity; check its weights"
            )
        largest = (plain - observed).abs().max().item()
        if largest > tolerance * max(1.0, plain.abs().max().item()):
            raise LensError(
                f"expected the logits of {model.alias} unchanged under observation, found a "
                f"difference of {largest:.1e}"
            )
        _check_batch(model, image, sketches, tolerance)
    return sites


def exact(device: torch.device) -> AbstractContextManager[None]:
    """Switch mixed precision off: tolerances are those of the model's precision."""
    if device.type == "meta":  # which torch.autocast does not know
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _sketch(call: AttentionCall) -> Tensor:
    """Return a sketch of the first image's weights: a random mean over the keys.

    It has the shape (windows, heads, query) and takes less memory than the weights.
    """
    weights = call.weights()
    generator = torch.Generator().manual_seed(_SKETCH_SEED)
    key_factors = torch.rand(weights.shape[-1], generator=generator).to(weights)
    windows = len(weights) // call.images
    return weights[:windows] @ key_factors


def _check_batch(model: Model, image: Images, sketches: list[Tensor], tolerance: float) -> None:
    """Raise LensError if the weights of an image change when it is the first of two.

    sketches: the sketch of its weights without the other image, for each call.
    """
    generator = torch.Generator().manual_seed(_OTHER_IMAGE_SEED)
    other = torch.rand(image.shape, generator=generator).to(image)
    expected = iter(sketches)

    def check(call: AttentionCall) -> None:
        single = next(expected, None)  # None if this pass has more calls
        sketch = _sketch(call).float()
        if single is None or not _show_same_image(single.float(), sketch, tolerance):
            raise LensError(
                "expected attention weights of an image that do not depend on the others of its "
                f"batch, found others in layer {call.site.layer} ({call.site.module}) of "
                f"{model.alias}; batch x heads has the batch first"
            )

    with observing(model, check):
        model(torch.cat([image, other]))


def _show_same_image(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Return True if two sketches are of the same image.

    Upper layers amplify rounding, but another image differs more.
    """
    if first.shape != second.shape:
        return False
    spread = (first - first.mean()).norm().item()
    difference = (first - second).norm().item()
    # the norm of the difference, if each number differs by the tolerance
    rounding = tolerance * first.numel() ** 0.5
    return bool(difference <= _LARGEST_SHARE * spread + rounding)


def _check_call(call: AttentionCall, tolerance: float) -> None:
    """Raise an error unless rows sum to 1 and weights @ value is the output of each head."""
    weights = call.weights()
    where = f"layer {call.site.layer} ({call.site.module})"
    if not torch.isfinite(weights).all():
        raise NonFiniteError(f"expected finite attention weights, found NaN or infinity in {where}")
    sums = weights.sum(-1)  # of each row
    is_wrong = (sums - 1).abs() > tolerance
    is_masked = sums == 0  # a fully masked row
    if (is_wrong & ~is_masked).any():
        raise LensError(f"expected attention rows that sum to 1, found others in {where}")
    if call.inputs is None or call.output is None:
        return
    difference = (weights @ call.inputs.value - call.output).abs().max().item()
    if difference > tolerance * max(1.0, call.output.abs().max().item()):
        raise LensError(
            "expected weights @ value to be the head's output, found a difference of "
            f"{difference:.1e} in {where}"
        )


def _store(tensors: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    """Store the tokens under a name, and return them unchanged, as a tap must."""
    tensors[name] = tokens
    return tokens


def _check_windows(call: AttentionCall, projected: Tensor, tolerance: float) -> None:
    """Raise LensError if the output projection shows that the presumed heads are windows.

    projected: the input of the output projection, which concatenates the heads of each token.
    """
    output = call.output  # (images x windows, heads, tokens, head_dim), or with the two exchanged
    assert output is not None  # the fused kernel returned it
    heads_joined = output.transpose(1, 2).flatten(2)
    with_windows = output.unflatten(0, (call.images, -1))  # (images, windows, heads, tokens, ..)
    windows_joined = with_windows.permute(0, 2, 3, 1, 4).flatten(3)
    if _holds_rows(projected, heads_joined, tolerance):
        return
    if _holds_rows(projected, windows_joined, tolerance):
        site = call.site
        raise LensError(
            f"expected {site.heads} heads in layer {site.layer} ({site.module}), found that its "
            f"output projection reads {len(output) // call.images} heads of {site.heads} windows; "
            "put the windows before the heads"
        )
    # neither: the module changes the outputs before it projects them, so that nothing is known


def _holds_rows(tokens: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return True if two tensors hold the same vectors along their last axes, in any order.

    Each vector is compared by its product with one random vector.
    """
    if tokens.shape[-1] != other.shape[-1] or tokens.numel() != other.numel():
        return False
    generator = torch.Generator().manual_seed(_SKETCH_SEED)
    direction = torch.rand(tokens.shape[-1], generator=generator, dtype=torch.float64)
    products = _sorted_products(tokens, direction)
    other_products = _sorted_products(other, direction)
    largest = max(1.0, products.abs().max().item())
    return bool((products - other_products).abs().max() <= tolerance * largest)


def _sorted_products(tokens: Tensor, direction: Tensor) -> Tensor:
    return (tokens.detach().cpu().double().flatten(0, -2) @ direction).sort().values


def require_special_first(model: Model) -> None:
    """Raise UnsupportedError for special tokens behind patches that cannot be moved before them."""
    if model.anatomy.attention and not model.anatomy.special_first:
        raise UnsupportedError(
            "expected special tokens before the patches, found none that can be read in "
            f"{model.alias}: {model.anatomy.unread}"
        )

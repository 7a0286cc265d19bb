"""Observe: run a model once and hand each layer's attention to a reducer.

Before the first run, the lens checks itself on one image (`survey`). `require_one_softmax` checks
that the weights of one softmax mix the values.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.devices import evaluating
from vitlens.errors import LensError, NonFiniteError, UnsupportedError
from vitlens.lens.attention import SITES, AttentionMode, tapped
from vitlens.lens.call import AttentionCall
from vitlens.lens.site import Site
from vitlens.lens.tap import Tap
from vitlens.models.attention import SOFTMAX, positional
from vitlens.models.attention_recording import maps_heads
from vitlens.models.hooks import ScopedMode, watching
from vitlens.models.memo import once_per_model
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits

Reducer = Callable[[AttentionCall], None]
# Kinds of torch's operations, by name, that `_Follower` tells apart. Names are without _ at either
# end, except for those that write in place.
_SUMS: Final = frozenset({"add", "sub", "rsub", "iadd", "isub", "radd", "lerp"})
_MAPS: Final = frozenset({"linear", "conv2d"})
_PRODUCTS: Final = frozenset({"matmul", "bmm", "einsum"})
_SCALING: Final = frozenset({"dropout", "mul", "rmul", "imul", "div", "neg"})
_WRITING: Final = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
_VIEWS: Final = frozenset(  # operations that keep the numbers
    {
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "movedim",
        "swapaxes",
        "squeeze",
        "unsqueeze",
        "chunk",
        "split",
        "unbind",
        "getitem",
        "select",
        "narrow",
        "contiguous",
        "clone",
        "to",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
    }
)
# largest difference of two sketches of one image, as a share of their spread over heads and
# queries; rounding stays below it
_OTHER: Final = 0.1
TOLERANCE: Final = 1e-4  # of weights @ value, compared with the output of the model's kernel, fp32
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
        if graph:
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
    tolerance = max(TOLERANCE, _ROUNDING_STEPS * torch.finfo(model.mean.dtype).eps)
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
            taps.append(Tap(modules={part.module}, joined=partial(_keep, projected, part.module)))
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
        single = next(expected, None)
        if single is None or not _are_close(single.float(), _sketch(call).float(), tolerance):
            raise LensError(
                "expected attention weights of an image that do not depend on the others of its "
                f"batch, found others in layer {call.site.layer} ({call.site.module}) of "
                f"{model.alias}; batch x heads has the batch first"
            )

    with observing(model, check):
        model(torch.cat([image, other]))


def _are_close(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Return True if two sketches are of the same image.

    Upper layers amplify rounding, but another image differs more.
    """
    if first.shape != second.shape:
        return False
    spread = (first - first.mean()).norm().item()
    difference = (first - second).norm().item()
    return bool(difference <= _OTHER * spread + tolerance * first.numel() ** 0.5)


def _check_call(call: AttentionCall, tolerance: float) -> None:
    """Raise an error unless rows sum to 1 and weights @ value is the output of each head."""
    weights = call.weights()
    where = f"layer {call.site.layer} ({call.site.module})"
    if not torch.isfinite(weights).all():
        raise NonFiniteError(f"expected finite attention weights, found NaN or infinity in {where}")
    sums = weights.sum(-1)
    if ((sums - 1).abs() > tolerance).logical_and(sums != 0).any():  # 0: a fully masked row
        raise LensError(f"expected attention rows that sum to 1, found others in {where}")
    if call.inputs is None or call.output is None:
        return
    difference = (weights @ call.inputs.value - call.output).abs().max().item()
    if difference > tolerance * max(1.0, call.output.abs().max().item()):
        raise LensError(
            "expected weights @ value to be the head's output, found a difference of "
            f"{difference:.1e} in {where}"
        )


def _keep(tensors: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
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


def require_one_softmax(model: Model, images: Images) -> None:
    """Raise UnsupportedError for a layer whose values are not mixed by the weights of one softmax.

    Some layers add or subtract the weights of several (DiffAttention), so that their sum may be
    negative. Some change the weights first: they keep the greatest ones, or apply a gate or another
    norm. The results of each softmax, and what they have mixed, are followed through the layer's
    forward pass.
    """
    follower = _followed(model, images)
    if follower.summed:
        raise UnsupportedError(
            "expected values mixed by the weights of one softmax, found several, added or "
            f"subtracted, in {follower.summed[0]} of {model.alias} (differential or gated "
            "attention)"
        )
    changed = follower.changed_modules()
    if changed:
        raise UnsupportedError(
            "expected values mixed by the weights of a softmax, found weights changed after it in "
            f"{changed[0]} of {model.alias} (the greatest ones, a gate, another norm); change the "
            "scores before the softmax instead"
        )


def require_special_first(model: Model) -> None:
    """Raise UnsupportedError for special tokens behind patches that cannot be moved before them."""
    if model.anatomy.attention and not model.anatomy.special_first:
        raise UnsupportedError(
            f"expected special tokens before the patches, found in {model.alias} that "
            f"{model.anatomy.unread}"
        )


def talking_heads(model: Model, images: Images) -> tuple[str, ...]:
    """Return the attention modules that mix the weights over heads after the softmax (CaiT).

    The observed weights of these modules are those before they are mixed.
    """
    return tuple(dict.fromkeys(_followed(model, images).mapped))


def _followed(model: Model, images: Images) -> "_Follower":
    """Return the follower after a forward pass of the first of the images."""
    follower = _Follower()

    def enter(name: str, _arguments: object) -> None:
        follower.enter(name)

    def leave(_name: str, _arguments: object, _output: object) -> None:
        follower.inside.pop()

    names = [part.module for part in model.anatomy.attention or ()]
    watched = watching(model.module, names, leave, before=enter, always=True)
    with evaluating(model), torch.no_grad(), watched, follower:
        model(images[:1])
    return follower


@dataclass(eq=False)
class _Softmax:
    """One softmax over the last axis in an attention module.

    module: the name of the attention module.
    is_used: whether its result has mixed values.
    is_read: whether anything was computed from it.
    """

    module: str
    is_used: bool = False
    is_read: bool = False


@dataclass(frozen=True, eq=False)
class _Followed:
    """A result of softmax, or a tensor that was computed from it.

    tensor: the tensor. It is held, because it is looked up by its identity.
    softmax: the softmax, or None if it was not over the last axis or belongs to a fused kernel.
    is_weights: whether the tensor has not mixed values yet.
    is_changed: whether its values differ from those of the softmax.
    is_mapped: whether its values were mixed over heads.
    """

    tensor: Tensor
    softmax: _Softmax | None
    is_weights: bool
    is_changed: bool = False
    is_mapped: bool = False


class _Follower(ScopedMode):
    """A mode that follows the results of softmax through an attention module.

    It follows what is computed from them, also the products in which they have mixed values, until
    two of them are added.

    inside: the attention modules that are running, the innermost last.
    followed: the followed tensors by identity.
    softmaxes: every softmax over the last axis.
    fused: the modules that call a fused kernel.
    summed: the modules in which two followed tensors were added.
    mapped: the modules in which weights were mixed over heads.
    changed: the modules in which changed weights have mixed values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.followed: dict[int, _Followed] = {}
        self.softmaxes: list[_Softmax] = []
        self.fused: set[str] = set()
        self.summed: list[str] = []
        self.mapped: list[str] = []
        self.changed: list[str] = []

    def enter(self, name: str) -> None:
        """Forget the results of the last attention module, and follow those of this one."""
        if not self.inside:
            self.followed.clear()
        self.inside.append(name)

    def changed_modules(self) -> tuple[str, ...]:
        """Return the modules in which the weights of no softmax have mixed the values unchanged."""
        mixing_modules = self.fused | set(self.mapped)
        for softmax in self.softmaxes:
            if softmax.is_used:
                mixing_modules.add(softmax.module)
        unused = []
        for softmax in self.softmaxes:
            if softmax.is_read and softmax.module not in mixing_modules:
                unused.append(softmax.module)
        return tuple(dict.fromkeys(self.changed + unused))

    def intercept(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute every call unchanged, and follow its result."""
        args, kwargs = positional(func, args, kwargs)
        name = getattr(func, "__name__", "")
        tensors = _operands((*args, *kwargs.values()))
        followed = [self.followed[id(tensor)] for tensor in tensors if id(tensor) in self.followed]
        weights = _first_weights(followed)
        weights_before = None
        if weights is not None and _plain_name(name) not in _VIEWS:
            if weights.softmax is not None:
                weights.softmax.is_read = True
            weights_before = weights.tensor.clone() if _is_in_place(name) else weights.tensor
        result = func(*args, **kwargs)
        if func in SOFTMAX and self.inside:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            self._begin(result, dim)
        elif func is F.scaled_dot_product_attention and self.inside:
            self.fused.add(self.inside[-1])
            self._follow(result, _Followed(result, None, is_weights=False))
        elif followed:
            self._follow_operation(name, tensors, followed, weights_before, result)
        return result

    def _follow_operation(
        self,
        name: str,
        tensors: list[Tensor],
        followed: Sequence[_Followed],
        weights_before: Tensor | None,
        result: Any,
    ) -> None:
        """Follow the result of an operation on followed tensors, by the kind of the operation.

        name: the full name of the operation.
        tensors: all tensors among its arguments.
        followed: those of them that are followed.
        weights_before: the first weights among these, with their values before the operation;
            None if there are none, or for a view.
        """
        plain_name = _plain_name(name)
        weights = _first_weights(followed)
        if plain_name in _SUMS and len(followed) > 1 and self.inside:
            self.summed.append(self.inside[-1])
        elif plain_name in _VIEWS:
            self._follow(result, weights or followed[0])
        elif weights is not None and _maps_weights(plain_name, weights.tensor, tensors, result):
            if self.inside:
                self.mapped.append(self.inside[-1])
            self._follow(result, replace(weights, is_mapped=True))
        elif plain_name in _PRODUCTS:  # with values
            for operand in followed:
                self._use(operand)
            self._follow(result, replace(followed[0], is_weights=False))
        elif weights is not None and weights_before is not None:  # any other operation on weights
            after = weights.tensor if name == "__setitem__" else result
            self._compare(weights, weights_before, after)
        elif plain_name in _SCALING:  # what was mixed is followed further; all else is dropped
            self._follow(result, followed[0])

    def _compare(self, weights: _Followed, before: Tensor, after: Any) -> None:
        """Follow weights after an operation, and note whether it changed their values."""
        if (
            not isinstance(after, Tensor)
            or after.shape != before.shape
            or not after.is_floating_point()
        ):
            return
        # `vitlens models` runs models on the meta device, whose tensors have only shapes
        is_same = after.is_meta or torch.allclose(
            after, before.to(after.dtype), rtol=0.0, atol=TOLERANCE
        )
        self._follow(after, replace(weights, is_changed=weights.is_changed or not is_same))

    def _begin(self, result: Tensor, dim: object) -> None:
        """Follow the result of a softmax."""
        softmax = None
        if dim in (-1, result.dim() - 1) and result.dim() >= 3 and result.shape[-1] > 1:
            softmax = _Softmax(self.inside[-1])
            self.softmaxes.append(softmax)
        self._follow(result, _Followed(result, softmax, is_weights=True))

    def _use(self, weights: _Followed) -> None:
        """Note that these weights have mixed values."""
        if weights.softmax is None or not weights.is_weights:
            return
        weights.softmax.is_used = True
        if weights.is_changed and not weights.is_mapped:
            self.changed.append(weights.softmax.module)

    def _follow(self, result: Any, like: _Followed) -> None:
        results = result if isinstance(result, tuple | list) else (result,)
        for tensor in results:
            if isinstance(tensor, Tensor):
                self.followed[id(tensor)] = replace(like, tensor=tensor)


def _plain_name(name: str) -> str:
    return name.strip("_")


def _is_in_place(name: str) -> bool:
    """Return True for an operation that writes into its first argument, such as `mul_`."""
    is_special = name.startswith("__")
    return name in _WRITING or (name.endswith("_") and not is_special)


def _operands(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among a call's arguments, also those in sequences."""
    tensors = []
    for value in values:
        members = value if isinstance(value, Sequence) else (value,)
        tensors += [member for member in members if isinstance(member, Tensor)]
    return tensors


def _first_weights(followed: Sequence[_Followed]) -> _Followed | None:
    for operand in followed:
        if operand.is_weights:
            return operand
    return None


def _maps_weights(name: str, weights: Tensor, tensors: list[Tensor], result: Any) -> bool:
    """Return True if an operation maps the weights linearly, for example over their heads.

    It then does not use them to mix values.
    """
    return name in _MAPS or (name in _PRODUCTS and maps_heads(weights, tensors, result))

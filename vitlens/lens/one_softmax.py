"""Check that the weights of one softmax mix the values of each attention layer.

A mode follows the results of softmax through a forward pass: what is computed from them, and what
they have mixed. `talking_heads` reads from it which layers mix the weights over heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.models.attention import SOFTMAX, positional
from vitlens.models.attention_recording import maps_heads
from vitlens.models.hooks import ScopedMode, watching
from vitlens.models.model import Model
from vitlens.shapes import Images

_TOLERANCE: Final = 1e-4  # largest difference of weights that counts as none
# Kinds of torch's operations, by name, that `_Follower` tells apart. Names are without _ at either
# end, except for those that write in place.
_SUMS: Final = frozenset({"add", "sub", "rsub", "iadd", "isub", "radd", "lerp"})
_MAPS: Final = frozenset({"linear", "conv2d"})
_PRODUCTS: Final = frozenset({"matmul", "bmm", "einsum"})
_SCALING: Final = frozenset({"dropout", "mul", "rmul", "imul", "div", "neg"})
_WRITING: Final = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
_VIEWS: Final = frozenset(  # operations that keep the values
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


def require_one_softmax(model: Model, images: Images) -> None:
    """Raise UnsupportedError for a layer whose values are not mixed by the weights of one softmax.

    Some layers add or subtract the weights of several (DiffAttention), so that their sum may be
    negative. Some change the weights first: they keep the greatest ones, or apply a gate or another
    norm. The results of each softmax, and what they have mixed, are followed through the layer's
    forward pass.
    """
    follower = _run_follower(model, images)
    if follower.summed:
        raise UnsupportedError(
            "expected values mixed by the weights of one softmax, found several, added or "
            f"subtracted, in {follower.summed[0]} of {model.alias} (differential or gated "
            "attention)"
        )
    changed = follower.changed_modules()
    if changed:
        raise UnsupportedError(
            "expected values mixed by the weights of a softmax, found weights changed "
            f"after it in {changed[0]} of {model.alias} (top-k selection, a gate, "
            "another norm); change the scores before the softmax instead"
        )


def talking_heads(model: Model, images: Images) -> tuple[str, ...]:
    """Return the attention modules that mix the weights over heads after the softmax (CaiT).

    The observed weights of these modules are those before they are mixed.
    """
    return tuple(dict.fromkeys(_run_follower(model, images).mapped))


def _run_follower(model: Model, images: Images) -> "_Follower":
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
    is_read: whether anything but a view was computed from it.
    """

    module: str
    is_used: bool = False
    is_read: bool = False


@dataclass(frozen=True, eq=False)
class _FollowedTensor:
    """A tensor that a `_Follower` follows: a result of softmax, or computed from one.

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
    two of them are added. The first fitting line decides what an operation means:

    | operation                                     | its result                                 |
    | sum of two followed tensors                   | dropped; the module is noted as summed     |
    | view                                          | followed like its operand                  |
    | linear map, or product with (heads, heads),   | followed as mapped weights                 |
    | of weights                                    |                                            |
    | product of any other followed tensor          | followed as mixed values; weights are used |
    | other operation on weights                    | followed as weights, compared for a change |
    | scaling of mixed values                       | followed like its operand                  |
    | any other operation                           | dropped                                    |

    A sum with only one followed operand is another operation: its values are compared.

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
        self.followed: dict[int, _FollowedTensor] = {}
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
        """Return the modules in which changed weights have mixed values, or no weights did.

        The latter have a softmax whose result was read, but was no factor of a product with values.
        """
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
        weights_before = None  # needed only to compare weights, which a view cannot change
        if weights is not None and _plain_name(name) not in _VIEWS:
            if weights.softmax is not None:
                weights.softmax.is_read = True
            weights_before = weights.tensor
            if _is_in_place(name):  # the operation may overwrite them
                weights_before = weights.tensor.clone()
        result = func(*args, **kwargs)
        if func in SOFTMAX and self.inside:
            dim = kwargs.get("dim")
            if dim is None and len(args) > 1:
                dim = args[1]
            self._begin(result, dim)
        elif func is F.scaled_dot_product_attention and self.inside:
            self.fused.add(self.inside[-1])
            self._follow(result, _FollowedTensor(result, softmax=None, is_weights=False))
        elif followed:
            self._follow_operation(name, tensors, followed, weights_before, result)
        return result

    def _follow_operation(
        self,
        name: str,
        tensors: list[Tensor],
        followed: Sequence[_FollowedTensor],
        weights_before: Tensor | None,
        result: Any,
    ) -> None:
        """Follow the result of an operation on followed tensors, by the kind of the operation.

        name: the full name of the operation.
        tensors: all tensors among its arguments.
        followed: those of them that are followed.
        weights_before: the values before the operation of the first weights among these: the
            tensor itself, or a copy if the operation writes in place. None without weights, and for
            a view.
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

    def _compare(self, weights: _FollowedTensor, before: Tensor, after: Any) -> None:
        """Follow weights after an operation, and note whether it changed their values."""
        if (
            not isinstance(after, Tensor)
            or after.shape != before.shape
            or not after.is_floating_point()
        ):  # not weights of these queries and keys
            return
        # `vitlens models` runs models on the meta device, whose tensors have only shapes
        is_same = after.is_meta or torch.allclose(
            after, before.to(after.dtype), rtol=0.0, atol=_TOLERANCE
        )
        self._follow(after, replace(weights, is_changed=weights.is_changed or not is_same))

    def _begin(self, result: Tensor, dim: object) -> None:
        """Follow the result of a softmax."""
        softmax = None
        if dim in (-1, result.dim() - 1) and result.dim() >= 3 and result.shape[-1] > 1:
            softmax = _Softmax(self.inside[-1])
            self.softmaxes.append(softmax)
        self._follow(result, _FollowedTensor(result, softmax, is_weights=True))

    def _use(self, weights: _FollowedTensor) -> None:
        """Note that a followed tensor is a factor of a product with values, if it is weights."""
        if weights.softmax is None or not weights.is_weights:  # mixed values, or a fused kernel
            return
        weights.softmax.is_used = True
        if weights.is_changed and not weights.is_mapped:
            self.changed.append(weights.softmax.module)

    def _follow(self, result: Any, like: _FollowedTensor) -> None:
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


def _first_weights(followed: Sequence[_FollowedTensor]) -> _FollowedTensor | None:
    for operand in followed:
        if operand.is_weights:
            return operand
    return None


def _maps_weights(name: str, weights: Tensor, tensors: list[Tensor], result: Any) -> bool:
    """Return True if an operation maps the weights linearly, for example over their heads.

    It then does not use them to mix values.
    """
    return name in _MAPS or (name in _PRODUCTS and maps_heads(weights, tensors, result))

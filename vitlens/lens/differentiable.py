"""One line for a model without gradients inside: where they are cut off, and what needs none.

A forward pass may switch them off (torch.no_grad around a frozen backbone), cut them off (detach, argmax), or hide them
from autograd (a checkpoint with use_reentrant=True).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from vitlens.devices import evaluating
from vitlens.errors import LensError, UnsupportedError, lacks_memory
from vitlens.lens.trace import probe_images
from vitlens.models.hooks import Arguments, per_model, watching
from vitlens.models.model import Model
from vitlens.models.nested import tensors_in

P = ParamSpec("P")
T = TypeVar("T")

WITHOUT_GRADIENTS: Final = (
    "what needs no gradient works: attention, rollout, occlusion, rise, kernel-shap, eigencam, scorecam, ablate"
)
_OFF: Final = "torch.no_grad, inference_mode or a checkpoint with use_reentrant=True"
_CUT: Final = "detach, or an operation without a gradient"


def needs_gradients(
    function: Callable[Concatenate[Model, P], T],
) -> Callable[Concatenate[Model, P], T]:
    """Decorate a function of a model: where autograd fails in it, UnsupportedError says why and what works."""

    @wraps(function)
    def differentiated(model: Model, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with needing_gradients(model):
            return function(model, *args, **kwargs)

    return differentiated


@contextmanager
def needing_gradients(model: Model, *, instead: str = WITHOUT_GRADIENTS) -> Iterator[None]:
    """Inside, what autograd raises of a model without gradients is UnsupportedError, which says where they end.

    instead: what needs none, for its message.
    """
    try:
        yield
    except (RuntimeError, LensError) as error:
        if lacks_memory(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        if isinstance(error, CheckpointError):
            raise UnsupportedError(
                f"expected equal activations when {model.alias} computes them again for its gradient, found others; "
                "switch its gradient checkpointing off (set_grad_checkpointing(False) or "
                "gradient_checkpointing_disable())"
            ) from error
        if "modified by an inplace operation" in str(error):
            raise UnsupportedError(
                f"expected a forward of {model.alias} that autograd can differentiate, found a tensor changed in place "
                f"after it was used; give the result a tensor of its own (x = x * 2, not x *= 2); {instead}"
            ) from error
        cause = cut_off(model)
        if not cause:
            raise
        raise UnsupportedError(
            f"expected a gradient inside {model.alias}, found none: {cause}; take that out of its forward; {instead}"
        ) from error


@per_model
def cut_off(model: Model) -> str:
    """Return where the gradient of the logits with respect to the image is cut off; "" where it is not."""
    causes, cuts = list[str](), list[str]()
    entered = list[bool]()

    def before(name: str, values: Arguments) -> None:
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        traced = any(value.requires_grad for value in tensors)
        entered.append(traced and torch.is_grad_enabled())
        where = name or "the model"
        if tensors and not torch.is_grad_enabled():
            causes.append(f"gradients are switched off in {where} ({_OFF})")
        elif tensors and not traced:
            # an input that is no floating-point tensor may be an index, which never has a gradient
            is_float = any(value.is_floating_point() for value in tensors)
            (causes if is_float else cuts).append(f"the input of {where} is cut off from the image ({_CUT})")

    def after(name: str, _values: Arguments, output: Any) -> None:
        traced = entered.pop()
        tensors = [value for value in tensors_in(output) if value.is_floating_point()]
        if traced and tensors and not any(value.requires_grad for value in tensors):
            causes.append(f"the output of {name or 'the model'} is cut off from the image ({_CUT})")

    names = [name for name, _ in model.module.named_modules()]
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    images = probe_images(model, 1).requires_grad_()
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        with (
            evaluating(model),
            torch.enable_grad(),
            watching(model.module, names, after, before=before, always=True),
        ):
            model(images)
    except RuntimeError:  # an inference tensor in a layer with a gradient
        pass
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
    return next(iter((*causes, *cuts)), "")

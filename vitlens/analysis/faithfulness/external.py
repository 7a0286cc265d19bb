"""Maps that vitlens did not make: arrays of fixed maps, and functions of others as methods.

A function is called on a copy of the images that requires gradients, in evaluation mode and with a
fixed seed. It must leave the model as it was: what it changes is put back, and the call is refused.
"""

from collections.abc import Callable
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.analysis.faithfulness.maps import AnyMaps, Explain
from vitlens.devices import evaluating
from vitlens.errors import InputError, first_line, lacks_memory
from vitlens.models.model import Model
from vitlens.models.untouched import Snapshot
from vitlens.shapes import Images, Labels, Maps

ExternalMethod = Callable[[Model, Images, Labels], Any]  # a function of others

_LISTED: Final = 1  # most changes of a model that a message lists


def require_maps(maps: object, model: Model, count: int, *, what: str) -> AnyMaps:
    """Return finite maps (count, rows, columns) as float32.

    what: the maps in a message, such as "maps of 'mine'".

    Raises InputError as `require_form`, and for NaN and infinity.
    """
    values = require_form(maps, model, count, what=what)
    broken = (~values.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if broken:
        raise InputError(
            f"expected {what} to be finite, found NaN or infinity in {len(broken)} of {count} "
            f"(image {broken[0]})"
        )
    return values


def require_form(maps: object, model: Model, count: int, *, what: str) -> AnyMaps:
    """Return maps (count, rows, columns) as float32.

    Raises InputError for anything but real numbers of this shape, and for maps that are coarser
    than the patches of the model, where it has patches.
    """
    values = _as_tensor(maps, what)
    shape = tuple(values.shape)
    if values.dim() != 3 or 0 in shape:
        raise InputError(
            f"expected {what} of shape (images, rows, columns), found {shape}{_advice(shape)}"
        )
    if len(values) != count:
        raise InputError(f"expected {what} for {count} images, found {len(values)}")
    layout = model.anatomy.layout
    if layout is not None and (shape[1] < layout.grid[0] or shape[2] < layout.grid[1]):
        rows, columns = layout.grid
        raise InputError(
            f"expected {what} with at least {rows}x{columns} values, one per patch, found "
            f"{shape[1]}x{shape[2]}"
        )
    return values.detach().float()


def _as_tensor(maps: object, what: str) -> Tensor:
    """Return real numbers as a tensor."""
    if isinstance(maps, np.ndarray):
        kind = str(maps.dtype)
        if maps.dtype.kind in "fiu":
            return torch.from_numpy(maps.astype(np.float32))
    elif isinstance(maps, Tensor):
        kind = str(maps.dtype).removeprefix("torch.")
        if maps.dtype != torch.bool and not maps.is_complex():
            return maps
    else:
        kind = type(maps).__name__
    raise InputError(f"expected {what} as an array or a tensor of real numbers, found {kind}")


def _advice(shape: tuple[int, ...]) -> str:
    """Return how to get three axes from this shape, as the end of a message."""
    if len(shape) == 4 and shape[1] == 1:
        return "; leave out the axis of channels with maps[:, 0]"
    if len(shape) == 4:
        return "; sum over the channels with maps.sum(1)"
    if len(shape) == 2:
        return "; put the patches into rows and columns with maps.reshape(len(maps), rows, columns)"
    return ""


def external_method(
    name: str, function: ExternalMethod, *, batch_size: int | None = None, seed: int = 0
) -> Explain:
    """Return a function of others as a method that the checks can call.

    name: the name of the method in messages.
    batch_size: images in one call (None: chosen to fit).
    seed: the seed that torch gets before each call.

    The method raises InputError, which names it, if the function raises, changes the model or
    returns anything but maps. They need not be finite, as the weights may be random.
    """

    def explain(model: Model, images: Images, targets: Labels) -> Maps:
        size = batch_size or max(1, fitting_batch_size(model) // BACKWARD)
        parts = list[Tensor]()
        for start in range(0, len(images), size):
            batch = images[start : start + size]
            batch_targets = targets[start : start + size]
            result = _call(name, function, model, batch, batch_targets, seed)
            part = require_form(result, model, len(batch), what=f"maps from {name!r}")
            parts.append(part.to(images.device))
        for part in parts:
            if part.shape[1:] != parts[0].shape[1:]:
                raise InputError(
                    f"expected maps of one size from {name!r}, found "
                    f"{tuple(parts[0].shape[1:])} and {tuple(part.shape[1:])}"
                )
        return torch.cat(parts)

    return explain


def _call(
    name: str,
    function: ExternalMethod,
    model: Model,
    images: Images,
    targets: Labels,
    seed: int,
) -> object:
    """Return what a function of others returns; the model is as before in any case."""
    devices = [images.device] if images.device.type == "cuda" else []
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.random.fork_rng(devices),
        evaluating(model),
    ):
        torch.manual_seed(seed)
        # weights may be frozen: without gradients of the images, nothing would have one
        leaves = images.detach().clone().requires_grad_()
        before = Snapshot(model)
        try:
            result = function(model, leaves, targets.to(images.device).clone())
            changes = before.changes()
        except Exception as error:
            if lacks_memory(error):
                raise
            raise InputError(
                f"expected maps from {name!r}, found an error{_place(error)}: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        finally:
            before.restore()
    if changes:
        listed = ", ".join(changes[:_LISTED])
        if len(changes) > _LISTED:
            listed += f" and {len(changes) - _LISTED} more"
        raise InputError(
            f"expected a method that leaves the model unchanged, found that {name!r} changes "
            f"{listed}; restore it before the method returns"
        )
    return result


def _place(error: Exception) -> str:
    """Return the line of the function in which an error was raised, or passed."""
    traceback = error.__traceback__
    if traceback is None or traceback.tb_next is None:
        return ""
    frame = traceback.tb_next  # the first frame is `_call`, the next one the function
    file = PurePath(frame.tb_frame.f_code.co_filename).name
    return f" in line {frame.tb_lineno} of {file}"

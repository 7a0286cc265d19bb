"""Weights from files, as data: safetensors or a plain state dict, never a pickle that runs code."""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitlens.errors import ModelError

_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model", "module")
_PREFIXES = ("module.", "_orig_mod.", "model.", "ema.", "backbone.")


class Weights(NamedTuple):
    """state: tensors by name; metadata: of a safetensors file; notes: the wrappers taken off, in words."""

    state: dict[str, Tensor]
    metadata: dict[str, str]
    notes: tuple[str, ...]


def read_weights(path: Path) -> Weights:
    """The state dict in a .safetensors, .pth or .pt file, without the usual wrappers.

    Raises ModelError when the file is missing, unreadable, or holds anything but tensors.
    """
    if not path.is_file():
        raise ModelError(f"expected a weights file, found nothing at {path}; give --weights FILE")
    if path.suffix == ".safetensors":
        try:
            with safe_open(str(path), framework="pt") as file:
                return _unwrap({key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {}))  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"expected safetensors in {path}, found a file that is not ({error})") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wonders aloud about a damaged pickle's protocol
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"expected a plain state dict in {path}, found a pickle that would run code: refused; "
            "save it again with torch.save(model.state_dict(), FILE) or as safetensors"
        ) from error
    except Exception as error:  # torch's reader raises a dozen types for a damaged file
        raise ModelError(
            f"expected a state dict in {path}, found a file that torch cannot read; {_line(error)}"
        ) from error
    return _unwrap(found, {})


def load_strictly(model: nn.Module, state: Mapping[str, Tensor], *, where: str) -> None:
    """Every tensor into its place. Raises ModelError with the first missing, unexpected and misshapen key."""
    expected = model.state_dict()
    missing = [key for key in expected if key not in state]
    unexpected = [key for key in state if key not in expected]
    shapes = [key for key in expected if key in state and expected[key].shape != state[key].shape]
    if missing or unexpected or shapes:
        raise ModelError(_misfit(where, expected, state, missing, unexpected, shapes))
    model.load_state_dict(dict(state), strict=True)


def _misfit(
    where: str,
    expected: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    missing: list[str],
    unexpected: list[str],
    shapes: list[str],
) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing (first {missing[0]!r})")
    if unexpected:
        parts.append(f"{len(unexpected)} unexpected (first {unexpected[0]!r})")
    if shapes:
        key = shapes[0]
        parts.append(f"{key!r} expected {tuple(expected[key].shape)}, found {tuple(state[key].shape)}")
    return f"weights do not fit {where}: {'; '.join(parts)}; check --arch, --image-size and --classes"


def _unwrap(found: object, metadata: dict[str, str]) -> Weights:
    notes: list[str] = []
    while isinstance(found, Mapping):
        wrapper = next((key for key in _WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if wrapper is None:
            break
        notes.append(f"took the weights from {wrapper!r}")
        found = found[wrapper]
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelError("expected a state dict (names to tensors), found something else; save model.state_dict()")
    state = {str(key): value for key, value in found.items()}
    while prefix := next((start for start in _PREFIXES if all(key.startswith(start) for key in state)), None):
        notes.append(f"took {prefix!r} off every name")
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return Weights(state, metadata, tuple(notes))


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]

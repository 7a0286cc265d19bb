"""Weights from files: safetensors or a plain state dict, never a pickle that could run code."""

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitlens.errors import ModelError, first_line

_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model", "module")
_PREFIXES = ("module.", "_orig_mod.", "model.", "ema.", "backbone.")
_NESTED = 8  # nested wrappers, and prefixes one after the other
_NAME = 1000  # characters of a tensor's name
_SPREAD = 16  # limit of the tensors' memory over the file's size; tensors may share memory
_SLACK = 1 << 20  # bytes


class Weights(NamedTuple):
    """state: tensors by name; metadata: of a safetensors file; notes: the wrappers and prefixes removed, in words."""

    state: dict[str, Tensor]
    metadata: dict[str, str]
    notes: tuple[str, ...]


def read_weights(path: Path) -> Weights:
    """The state dict in a .safetensors, .pth or .pt file, without the usual wrappers.

    Raises ModelError when the file is missing, unreadable, or holds anything but finite tensors of real numbers.
    """
    if not path.is_file():
        raise ModelError(f"expected a weights file, found nothing at {path}; give --weights FILE")
    stored: object
    metadata: dict[str, str] = {}
    if path.suffix == ".safetensors":
        try:
            with safe_open(str(path), framework="pt") as file:
                stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                metadata = dict(file.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise ModelError(f"expected safetensors in {path}, found a file that is not ({error})") from error
    else:
        require_unpacked(path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the protocol of a damaged pickle
                stored = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ModelError(
                f"expected a plain state dict in {path}, found a pickle that would run code: refused; "
                "save it again with torch.save(model.state_dict(), FILE) or as safetensors"
            ) from error
        except Exception as error:  # torch's reader raises a dozen types for a damaged file
            raise ModelError(
                f"expected a state dict in {path}, found a file that torch cannot read; {first_line(error)}"
            ) from error
    state, notes = _unwrapped(stored)
    room = _SPREAD * path.stat().st_size + _SLACK
    for name, value in state.items():
        other = value.layout != torch.strided or value.is_quantized or value.device.type != "cpu" or value.is_complex()
        room -= 0 if other else value.numel() * value.element_size()
        if other or room < 0:
            kind = f"{value.layout}, {value.dtype}, {value.device}" if other else "more than the file holds"
            raise ModelError(
                f"expected plain tensors of real numbers in {path}, found shape {tuple(value.shape)}, {kind}, in "
                f"{name[:80]!r}; save model.state_dict() again"
            )
    require_finite(state, path)
    return Weights(state, metadata, notes)


def _unwrapped(stored: object) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors without the usual wrappers and prefixes, and what was removed, in words."""
    notes: list[str] = []
    while isinstance(stored, Mapping) and len(notes) < _NESTED:
        wrapper = next((key for key in _WRAPPERS if isinstance(stored.get(key), Mapping)), None)
        if wrapper is None:
            break
        notes.append(f"took the weights from {wrapper!r}")
        stored = stored[wrapper]
    if not isinstance(stored, Mapping) or not stored or not all(isinstance(value, Tensor) for value in stored.values()):
        raise ModelError("expected a state dict (names to tensors), found something else; save model.state_dict()")
    if any(len(str(key)) > _NAME for key in stored):
        raise ModelError(f"expected names of tensors of at most {_NAME:,} characters, found a longer one")
    state = {str(key): value for key, value in stored.items()}
    while len(notes) < 2 * _NESTED and (
        prefix := next((start for start in _PREFIXES if all(key.startswith(start) for key in state)), None)
    ):
        notes.append(f"took {prefix!r} off every name")
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state, tuple(notes)


def require_unpacked(path: Path) -> None:
    """Refuse a zip that would need far more memory than its size: torch.save does not compress."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                return
            with zipfile.ZipFile(file) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ModelError(f"expected a state dict in {path}, found a damaged file: {first_line(error)}") from error
    size = path.stat().st_size
    if unpacked > 2 * size + _SLACK:
        raise ModelError(
            f"expected {path} as torch.save writes it, found {unpacked:,} bytes packed into {size:,}; "
            "save it again with torch.save"
        )


def require_finite(state: Mapping[str, Tensor], path: Path) -> None:
    """Refuse NaN and infinity, with which every logit and every map would be NaN.

    Attention masks (-inf at what is masked) are not weights.
    """
    for name, value in state.items():
        if not value.is_floating_point() or name.endswith("mask"):
            continue
        if value.element_size() > 1 and bool(value.sum(dtype=torch.float64).isfinite()):
            continue
        wide = value.float() if value.element_size() < 4 else value
        if count := int((~wide.isfinite()).sum()):
            kind = "NaN" if bool(wide.isnan().any()) else "infinity"
            raise ModelError(
                f"expected finite weights in {path}, found {kind} in {name[:80]!r} ({count:,} of {value.numel():,} "
                "values); every prediction would be NaN: take an earlier checkpoint"
            )


def require_fitting(model: nn.Module, state: Mapping[str, Tensor], *, where: str) -> None:
    """Raise ModelError, with the first missing, unexpected and misshapen key, unless the weights are the model's."""
    expected = model.state_dict()
    known = (
        ("missing", [key for key in expected if key not in state]),
        ("unexpected", [key for key in state if key not in expected]),
    )
    shapes = [key for key in expected if key in state and expected[key].shape != state[key].shape]
    faults = [f"{len(keys)} {word} (first {keys[0]!r})" for word, keys in known if keys]
    faults += [f"{key!r} expected {tuple(expected[key].shape)}, found {tuple(state[key].shape)}" for key in shapes[:1]]
    if faults:
        raise ModelError(f"weights do not fit {where}: {'; '.join(faults)}; check --arch, --image-size and --classes")


def load_strictly(model: nn.Module, state: Mapping[str, Tensor], *, where: str) -> None:
    """Load a state dict. Raises ModelError for one that does not fit."""
    require_fitting(model, state, where=where)
    model.load_state_dict(dict(state), strict=True)


def to_save(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, each with its own memory: safetensors refuses those that share it, as tied weights do."""
    tensors: dict[str, Tensor] = {}
    taken: set[int] = set()
    for key, value in state.items():
        tensor = value.detach().cpu().contiguous()
        tensors[key] = tensor.clone() if tensor.data_ptr() in taken else tensor
        taken.add(tensor.data_ptr())
    return tensors

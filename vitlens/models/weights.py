"""Weights from files: safetensors or a plain state dict, never a pickle that could run code.

`read_weights` loads a file, takes the state dict out of what training scripts put around it
(`_unwrap`), and checks its tensors. The file itself may be the user's, so that nothing in it is
trusted.
"""

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitlens.errors import ModelError, argument, first_line
from vitlens.models.library_folders import typed_name, weights_inside
from vitlens.signatures import described, is_pickle, is_safetensors

# words in the key of averaged weights
_AVERAGE = re.compile(r"(^|_)(ema|swa|averaged?|shadow)(_|$)", re.IGNORECASE)
# keys of weights in a training file, in order of preference
_WHOLE = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "network",
    "net",
    "teacher",
    "student",
    "checkpoint",
)
_PARTS = ("backbone", "encoder", "params", "weights")
_WRAPPERS = (*_WHOLE, *_PARTS)
# words in keys without weights
_OF_TRAINING = re.compile(r"optim|sched|scaler|amp|rng|momentum|queue|callback", re.IGNORECASE)
# what wrappers of blocks add inside names
_INFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_PREFIXES = ("module.", "model.", "ema.", "backbone.")
_MOST_NESTED = 8  # most nested wrappers, and most prefixes one after the other
_MOST_SHOWN = 3  # names and entries in a message
# the refused object in the message of torch's reader
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
# what training files store with the weights; none of it is created (see Ignored)
_IGNORED = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
)
_MOST_TENSORS = 20_000  # of a file; the largest vision transformers have a tenth of them
_NAME_LENGTH = 1000  # most characters of a tensor's name
# the tensors of a file may take this many times its size, as they may share memory, plus the slack
_MEMORY_FACTOR = 16
_SLACK = 1 << 20  # bytes


class Weights(NamedTuple):
    """The weights of a file.

    state: the tensors by name.
    metadata: the metadata of a safetensors file.
    notes: the wrappers and prefixes that were removed.
    """

    state: dict[str, Tensor]
    metadata: dict[str, str]
    notes: tuple[str, ...]


def read_weights(path: Path) -> Weights:
    """Return the state dict in a file of safetensors or of torch.save, without the usual wrappers.

    The suffix of the file does not matter. Raises ModelError when the file is missing, unreadable,
    or holds anything but finite tensors of real numbers.
    """
    _require_file(path)
    stored: object
    metadata: dict[str, str] = {}
    has_no_signature = not is_pickle(path) and not described(path)
    # of a damaged file, only the suffix shows that it was safetensors
    if is_safetensors(path) or (path.suffix == ".safetensors" and has_no_signature):
        try:
            with safe_open(str(path), framework="pt") as file:
                _require_few_tensors(len(file.keys()), path)
                stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                metadata = dict(file.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"expected safetensors in {path}, found a file that is not ({error})"
            ) from error
    else:
        stored = _load_plainly(path)
    state, notes = _unwrap(stored, path)
    _require_few_tensors(len(state), path)
    _require_plain(state, path)
    require_finite(state, path)
    return Weights(state, metadata, notes)


def _require_few_tensors(count: int, path: Path) -> None:
    """Raise ModelError for a file of so many tensors that it would take minutes to compare them."""
    if count > _MOST_TENSORS:
        raise ModelError(
            f"expected at most {_MOST_TENSORS:,} tensors in {path}, found {count:,}; save the "
            "weights of one model"
        )


def _require_plain(state: Mapping[str, Tensor], path: Path) -> None:
    """Raise ModelError for tensors that are not plain ones, or not of real numbers.

    Weights must have floating-point numbers, and tensors must not take far more memory than the
    file.
    """
    remaining_bytes = _MEMORY_FACTOR * path.stat().st_size + _SLACK
    for name, value in state.items():
        fault = ""
        if not _is_plain(value):
            fault = f"{value.layout}, {value.dtype}, {value.device}"
        else:
            remaining_bytes -= value.numel() * value.element_size()
            if remaining_bytes < 0:
                fault = "more than the file holds"
        if fault:
            raise ModelError(
                f"expected plain tensors of real numbers in {path}, found shape "
                f"{tuple(value.shape)}, {fault}, in {name[:80]!r}; save model.state_dict() again"
            )
        if value.ndim > 1 and name.endswith("weight") and not value.is_floating_point():
            raise ModelError(
                f"expected weights of floating-point numbers in {path}, found "
                f"{value.dtype} in {name[:80]!r}: quantised, without their scales; use "
                "the weights from before the quantisation"
            )


def _is_plain(value: Tensor) -> bool:
    """Return True for a dense tensor of real numbers on the CPU."""
    is_dense = value.layout == torch.strided and not value.is_quantized
    return is_dense and value.device.type == "cpu" and not value.is_complex()


def _require_file(path: Path) -> None:
    """Raise ModelError unless the path is a file that can be read."""
    if path.is_dir():
        library, name = typed_name(path)
        inside = weights_inside(path)
        of = f" of {library}" if library else ""
        if name:
            advice = f"write {name}"
        elif inside:
            advice = f"name {path / inside}"
        else:
            advice = "name a file of weights"
        raise ModelError(f"expected a weights file, found the folder {path}{of}; {advice}")
    if not path.is_file():
        content = "no plain file" if path.exists() else "nothing"
        raise ModelError(
            f"expected a weights file, found {content} at {path}; give "
            f"{argument('weights', 'FILE')}"
        )
    if not os.access(path, os.R_OK):
        raise ModelError(
            f"expected a weights file that can be read, found no permission to read {path}; see "
            "chmod"
        )


def _load_plainly(path: Path) -> object:
    """Return the object that torch.save stored, without running code.

    Objects of a few types that training files contain become empty.
    """
    kind = described(path)
    if kind:
        raise ModelError(
            f"expected a state dict or safetensors in {path}, found {kind}{_advice(kind, path)}"
        )
    require_unpacked(path)
    try:
        with (
            warnings.catch_warnings(),
            torch.serialization.safe_globals([(Ignored, name) for name in _IGNORED]),
        ):
            warnings.simplefilter("ignore")  # of the protocol of a damaged pickle
            with path.open("rb") as file:  # torch itself goes by the suffix
                return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not is_pickle(path):
            raise ModelError(
                f"expected a state dict in {path}, found a file of another kind; save it with "
                "torch.save(model.state_dict(), FILE) or as safetensors"
            ) from error
        match = _GLOBAL.search(str(error))
        refused = f" ({match[1][:80]})" if match else ""
        raise ModelError(
            f"expected a plain state dict in {path}, found a pickle that would run code: "
            f"refused{refused}; save it again where it was made, with "
            "torch.save(model.state_dict(), FILE) or as safetensors. Where you trust the file: "
            f"{_conversion(path)}"
        ) from error
    except Exception as error:  # torch's reader raises a dozen types for a damaged file
        raise ModelError(
            f"expected a state dict in {path}, found a file that torch cannot read; "
            f"{first_line(error)}"
        ) from error


def _conversion(path: Path) -> str:
    """Return the command that saves the weights of a file that is trusted."""
    code = (
        f"import torch; f = torch.load({str(path)!r}, weights_only=False); "
        "torch.save(f.get('state_dict', f.get('model', f)), 'weights.pth')"
    )
    return f'python -c "{code}"'


def _advice(kind: str, path: Path) -> str:
    """Return how to convert a file of this kind; kind: its description."""
    if ":" in kind:  # the description has advice
        return ""
    if "NumPy" in kind:
        code = (
            f"import timm, torch; m = timm.create_model('NAME', checkpoint_path={str(path)!r}); "
            "torch.save(m.state_dict(), 'weights.pth')"
        )
        return f'; timm converts those of its ViTs: python -c "{code}"'
    if "TorchScript" in kind:
        code = (
            f"import torch; torch.save(torch.jit.load({str(path)!r}).state_dict(), 'weights.pth')"
        )
        return f'; where you trust it: python -c "{code}"'
    return "; save them with torch.save(model.state_dict(), FILE) or as safetensors"


class Ignored:
    """A class of empty instances, which stand for stored objects that are not needed.

    Training files store such objects with their weights, for example the options.
    """

    def __new__(cls, *_args: object, **_options: object) -> "Ignored":
        """Return an empty instance, whatever the arguments."""
        return super().__new__(cls)

    def __init__(self, *_args: object, **_options: object) -> None:
        """Keep nothing."""

    def __setstate__(self, _state: object) -> None:
        """Keep nothing."""


def _unwrap(stored: object, path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors without the usual wrappers and prefixes, and notes of what was removed."""
    notes: list[str] = []
    for _ in range(_MOST_NESTED):
        if not isinstance(stored, Mapping):
            break
        keys = _state_keys(stored)
        wrapper = _preferred_key(keys)
        if wrapper is None:
            break
        note = f"took the weights from {wrapper[:80]!r}"
        other_keys = [key for key in keys if key != wrapper]
        if other_keys:
            note += f", not {list_names(other_keys)}"
        notes.append(note)
        stored = stored[wrapper]
    if not isinstance(stored, Mapping) or not _is_state(stored):
        raise ModelError(
            f"expected a state dict (names to tensors) in {path}, found {_contents(stored)}; save "
            "model.state_dict()"
        )
    if any(len(str(key)) > _NAME_LENGTH for key in stored):
        raise ModelError(
            f"expected names of tensors of at most {_NAME_LENGTH:,} characters, found a longer one"
        )
    state = {str(key): value for key, value in stored.items()}
    for infix in _INFIXES:
        if any(infix in key for key in state):
            notes.append(f"removed {infix!r} from the names")
            state = {key.replace(infix, ""): value for key, value in state.items()}
    for _ in range(_MOST_NESTED):
        prefix = _common_prefix(state)
        if not prefix:
            break
        notes.append(f"removed {prefix!r} from every name")
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state, tuple(notes)


def _common_prefix(names: Iterable[str]) -> str:
    """Return the first of the usual prefixes that all names have, or ""."""
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in names):
            return prefix
    return ""


def _preferred_key(keys: Sequence[str]) -> str | None:
    """Return the key of the weights to take, or None if the keys do not show it.

    An average comes first, as in timm, then the usual keys, then the only key.
    """
    averages = [key for key in keys if _AVERAGE.search(key)]
    wrappers = [key for key in _WRAPPERS if key in keys]
    if averages:
        return min(averages, key=len)
    if wrappers:
        return wrappers[0]
    if len(keys) == 1:
        return keys[0]
    return None


def _state_keys(stored: Mapping[object, object]) -> list[str]:
    """Return the keys of state dicts, and of mappings that hold some.

    The state of an optimiser is left out.
    """
    keys = []
    for key, value in stored.items():
        if isinstance(key, str) and not _OF_TRAINING.search(key) and _holds_state(value):
            keys.append(key)
    return keys


def _holds_state(value: object, depth: int = _MOST_NESTED) -> bool:
    """Return True for a state dict, and for a mapping that holds one."""
    if _is_state(value):
        return True
    if depth == 0 or not isinstance(value, Mapping):
        return False
    for key, item in value.items():
        if isinstance(key, str) and not _OF_TRAINING.search(key) and _holds_state(item, depth - 1):
            return True
    return False


def _is_state(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(item, Tensor) for item in value.values())
    )


def _contents(stored: object) -> str:
    """Describe the object that is stored in place of a state dict."""
    if isinstance(stored, Tensor):
        return "a tensor"
    if not isinstance(stored, Mapping):
        return f"an object of type {type(stored).__name__}"
    if not stored:
        return "an empty one"
    other_entries = [key for key, value in stored.items() if not isinstance(value, Tensor)]
    if all(isinstance(value, Ignored) for value in stored.values()):
        return (
            "arrays of NumPy or other objects in place of tensors (torch.from_numpy makes "
            "tensors of arrays)"
        )
    if len(other_entries) < len(stored):
        first = other_entries[0]
        return f"{str(first)[:80]!r} ({type(stored[first]).__name__}) among the tensors"
    entries = [f"{str(key)[:40]!r} ({type(value).__name__})" for key, value in stored.items()]
    text = f"the entries {', '.join(entries[:_MOST_SHOWN])}"
    if len(entries) > _MOST_SHOWN:
        text += f" and {len(entries) - _MOST_SHOWN} more"
    return text


def require_unpacked(path: Path) -> None:
    """Raise ModelError for a zip that would take far more memory than its size.

    torch.save does not compress.
    """
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                return
            with zipfile.ZipFile(file) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ModelError(
            f"expected a state dict in {path}, found a damaged file: {first_line(error)}"
        ) from error
    size = path.stat().st_size
    if unpacked > 2 * size + _SLACK:
        raise ModelError(
            f"expected {path} as torch.save writes it, found {unpacked:,} bytes packed into "
            f"{size:,}; save it again with torch.save"
        )


def require_finite(state: Mapping[str, Tensor], path: Path) -> None:
    """Raise ModelError for NaN and infinity, with which every logit and every map would be NaN.

    Attention masks, with -inf at masked places, are not weights.
    """
    for name, value in state.items():
        if not value.is_floating_point() or name.endswith("mask"):
            continue
        # the quick test of most tensors: a finite sum has only finite terms. Types of 8 bits have
        # no such sum.
        if value.element_size() > 1 and bool(value.sum(dtype=torch.float64).isfinite()):
            continue
        wide = value.float() if value.element_size() < 4 else value
        count = int((~wide.isfinite()).sum())
        if count:
            kind = "NaN" if bool(wide.isnan().any()) else "infinity"
            raise ModelError(
                f"expected finite weights in {path}, found {kind} in {name[:80]!r} ("
                f"{count:,} of {value.numel():,} values); every prediction would be NaN; "
                "use an earlier checkpoint"
            )


def list_names(names: Sequence[str]) -> str:
    """Return the first names of tensors or entries, as text."""
    text = ", ".join(repr(name[:80]) for name in names[:_MOST_SHOWN])
    if len(names) > _MOST_SHOWN:
        text += f" and {len(names) - _MOST_SHOWN} more"
    return text


def to_save(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a new state dict of the tensors on the CPU, with separate memory.

    safetensors refuses shared memory, such as tied weights.
    """
    tensors: dict[str, Tensor] = {}
    addresses: set[int] = set()  # of storages, which also a part of a tensor shares
    for key, value in state.items():
        tensor = value.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in addresses:
            tensor = tensor.clone()
        tensors[key] = tensor
        addresses.add(tensor.untyped_storage().data_ptr())
    return tensors

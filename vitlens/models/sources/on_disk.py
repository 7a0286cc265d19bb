"""timm's ViT classifiers whose weights lie in the caches of the hubs: read, never changed (hub.py downloads)."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vitlens.models.naming import ModelName

_HASH = re.compile(r"-[0-9a-f]{8,}$")  # that torch.hub appends to the names of its files
_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")


def vits_on_disk() -> tuple[ModelName, ...]:
    """timm's ViTs of ImageNet's classes whose weights are on this disk, as names to load, by name.

    timm is imported only where a cache holds files that may be of its models.
    """
    found = [*_of_hugging_face(), *_of_torch()]
    if not found:
        return ()
    from vitlens.models.sources.timm import is_vit_of_imagenet

    known = sorted((name, str(file)) for name, file in found if is_vit_of_imagenet(name))
    return tuple(ModelName(f"timm:{name}", name, file) for name, file in known)


def _of_hugging_face() -> Iterator[tuple[str, Path]]:
    """The models of the repositories timm/NAME, of the latest snapshot that holds weights."""
    for folder in _folders(hugging_face_cache(), "models--timm--*"):
        files = [snapshot / name for snapshot in _folders(folder / "snapshots", "*") for name in _WEIGHTS]
        whole = [file for file in files if file.is_file()]  # a link whose file is gone is none
        if whole:
            yield folder.name.removeprefix("models--timm--"), max(whole, key=lambda file: file.stat().st_mtime)


def _of_torch() -> Iterator[tuple[str, Path]]:
    """Files that torch.hub downloaded, by their names without the hash."""
    for pattern in ("*.pth", "*.safetensors"):
        for file in sorted(_torch().glob(pattern)) if _torch().is_dir() else ():
            yield _HASH.sub("", file.stem), file


def _folders(root: Path, pattern: str) -> list[Path]:
    return sorted(path for path in root.glob(pattern) if path.is_dir()) if root.is_dir() else []


def hugging_face_cache() -> Path:
    """The cache of Hugging Face's hub, by the variables that its client reads."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or _user_cache() / "huggingface"
    return Path(named).expanduser() if named else Path(home).expanduser() / "hub"


def _torch() -> Path:
    """Where torch.hub keeps checkpoints."""
    return Path(os.environ.get("TORCH_HOME") or _user_cache() / "torch").expanduser() / "hub" / "checkpoints"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")

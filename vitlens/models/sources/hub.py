"""The hubs of pretrained weights: downloads, with a short timeout without network, and caches."""

import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants, hf_hub_download
from torch.hub import get_dir
from tqdm.auto import tqdm

from vitlens.errors import ModelError, argument, first_line
from vitlens.models.model_names import ModelName, parse_model

TIMEOUT = 5  # seconds until the first response, which usually takes less than one
SMALL_VIT: Final = "deit_tiny_patch16_224.fb_in1k"  # timm's name; ImageNet's 1000 classes
SMALL_VIT_SIZE: Final = 23  # MB
# progress(MB) is a context manager of a bar; it yields a function to call with each MB that is done
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
_SAFETENSORS: Final = "model.safetensors"
_WEIGHTS: Final = (_SAFETENSORS, "pytorch_model.bin")  # files of weights in timm's repositories
# bytes between two steps of the bar; the client's default is ten times that
_CHUNK: Final = 1 << 20
_HASH: Final = re.compile(r"-[0-9a-f]{8,}$")  # torch.hub appends a hash to the names of its files


def endpoint() -> str:
    """Return the address of Hugging Face's hub, or of the mirror that HF_ENDPOINT names."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


@contextmanager
def offline(on: bool = True) -> Iterator[None]:
    """Download nothing inside: only caches are read.

    on: False changes nothing.
    """
    previous = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = previous or on
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = previous


@contextmanager
def pretrained_download(name: str, address: str, *, advice: str = "") -> Iterator[None]:
    """Download pretrained weights inside, or read them from the cache.

    Offline, and without a network, only the cache is read. Without a network, the hub's client
    would otherwise retry for most of a minute. Weights that are not cached raise ModelError.

    name: the name of the model, for messages.
    address: the address that must respond for a download.
    advice: the remedy at the end of the message.
    """
    remedies = f"{argument('weights', 'FILE')}, or {argument('random_weights', True)}"
    advice = advice or f"give {remedies} for a sanity check"
    is_offline = constants.HF_HUB_OFFLINE
    log = logging.getLogger("huggingface_hub")  # it warns of each retry
    is_reachable = not is_offline and _answers(address)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with offline(not is_reachable):
            yield
    except (OSError, HTTPException, RuntimeError) as error:
        if is_offline:
            reason = "found neither, offline"
        elif is_reachable:
            reason = f"the download failed ({first_line(error, 120)})"
        else:
            reason = "found no network"
        raise ModelError(
            f"expected pretrained weights of {name} from {address} or the cache, {reason}; {advice}"
        ) from error
    finally:
        log.setLevel(level)


def _answers(address: str) -> bool:
    """Return True if a server responds at this address."""
    request = urllib.request.Request(address, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT):
            return True
    except urllib.error.HTTPError:
        return True  # the server refused this page, so there is a network
    except (OSError, HTTPException):
        return False


def download_small_vit(*, begins: Callable[[str], None], progress: Progress) -> ModelName:
    """Download SMALL_VIT, only as safetensors, into the hub's cache.

    An interrupted download is resumed by the next one. Raises ModelError, with only the reason, if
    downloads are off, no server responds, or the download fails.

    begins: called with the hub's address before the first byte.
    progress: the bar of the download.
    """
    repository = f"timm/{SMALL_VIT}"
    address = endpoint()
    previous_chunk = constants.DOWNLOAD_CHUNK_SIZE
    if constants.HF_HUB_OFFLINE:
        raise ModelError("nothing is downloaded offline")
    if not _answers(f"{address}/{repository}"):
        raise ModelError(f"{address} does not answer")
    begins(address)
    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK
    try:
        with progress(SMALL_VIT_SIZE) as advance:
            file = hf_hub_download(
                repository, _SAFETENSORS, endpoint=address, tqdm_class=_bar(advance)
            )
    except Exception as error:  # the client, its transport and the disk raise a dozen types
        raise ModelError(
            f"the download from {address} failed ({first_line(error, 120)})"
        ) from error
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = previous_chunk
    name = parse_model(f"timm:{SMALL_VIT}")
    return ModelName(name.name, name.alias, str(Path(file)))


def _bar(advance: Callable[[int], None]) -> type[Any]:
    """Return the class of the client's bar, which prints nothing and passes whole MB on."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *_: object, initial: float = 0, **__: object) -> None:
            super().__init__(disable=True)
            self.done = 0.0
            self.update(initial)

        def update(self, n: float | None = 1) -> None:
            before = self.done  # in bytes
            self.done += n or 0
            megabytes = int(self.done / 1e6) - int(before / 1e6)
            if megabytes:
                advance(megabytes)

    return Bar


def vits_on_disk() -> tuple[ModelName, ...]:
    """Return the names of timm's ViTs of ImageNet's classes with weights in the hubs' caches.

    timm is imported only if a cache holds files that may be of its models.
    """
    cached: list[tuple[str, Path]] = []
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--timm--*")):
        files: list[Path] = []
        for name in _WEIGHTS:
            # a link without its file is left out
            files += [file for file in folder.glob(f"snapshots/*/{name}") if file.is_file()]
        if files:
            latest = max(files, key=lambda file: file.stat().st_mtime)
            cached.append((folder.name.removeprefix("models--timm--"), latest))
    for pattern in ("*.pth", "*.safetensors"):
        for file in Path(get_dir()).glob(f"checkpoints/{pattern}"):
            cached.append((_HASH.sub("", file.stem), file))
    if not cached:
        return ()
    from vitlens.models.sources.timm import is_vit_of_imagenet

    vits = [(name, str(file)) for name, file in cached if is_vit_of_imagenet(name)]
    return tuple(ModelName(f"timm:{name}", name, file) for name, file in sorted(vits))

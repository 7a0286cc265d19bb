"""Downloads of pretrained weights, with a short timeout where there is no network."""

import logging
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants, hf_hub_download
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from vitlens.errors import ModelError
from vitlens.models.naming import ModelName, parse_model
from vitlens.models.sources.on_disk import hugging_face_cache

TIMEOUT = 5  # seconds until the first response; usually there within one
SMALL_VIT: Final = "deit_tiny_patch16_224.fb_in1k"  # of timm: ImageNet's 1000 classes
SMALL_VIT_SIZE: Final = 23  # MB
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""A bar of so many MB: a context manager that gives the function to call with those just done."""
_WEIGHTS: Final = "model.safetensors"
_SHOWN: Final = 120  # characters of an error of the hub's client
_PART: Final = 1 << 20  # bytes between two steps of the bar; the client's own are ten times as many


def endpoint() -> str:
    """The address of Hugging Face's hub, or of the mirror that HF_ENDPOINT names."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


@contextmanager
def offline(wanted: bool = True) -> Iterator[None]:
    """Inside, nothing is downloaded: only caches are read."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or wanted
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def download_small_vit(*, begins: Callable[[str], None], progress: Progress) -> ModelName:
    """Download SMALL_VIT into the hub's cache, as safetensors alone; an interrupted download is resumed by the next.

    begins: called with the hub's address before the first byte. Raises ModelError, with the reason alone, where nothing
    may be downloaded, nothing answers, or the download fails.
    """
    repository, address, part = f"timm/{SMALL_VIT}", endpoint(), constants.DOWNLOAD_CHUNK_SIZE
    if constants.HF_HUB_OFFLINE:
        raise ModelError("nothing is downloaded offline")
    if not _answers(f"{address}/{repository}"):
        raise ModelError(f"{address} does not answer")
    begins(address)
    constants.DOWNLOAD_CHUNK_SIZE = _PART
    try:
        with ExitStack() as shown:
            file = hf_hub_download(
                repository,
                _WEIGHTS,
                cache_dir=hugging_face_cache(),
                endpoint=address,
                tqdm_class=_bar(shown.enter_context(progress(SMALL_VIT_SIZE))),
            )
    except Exception as error:  # of the client, its transport, or the disk: a dozen types
        raise ModelError(f"the download from {address} failed ({_first_line(error)})") from error
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = part
    name = parse_model(f"timm:{SMALL_VIT}")
    return ModelName(name.name, name.alias, str(Path(file)))


def _bar(advance: Callable[[int], None]) -> type[Any]:
    """The class of the client's bar, which shows nothing itself and hands on whole MB."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *_: object, initial: float = 0, **__: object) -> None:
            super().__init__(disable=True)
            self.done, self.told = float(initial or 0), 0
            self.update(0)

        def update(self, n: float | None = 1) -> None:
            self.done += n or 0
            whole = int(self.done / 1e6) - self.told
            self.told += whole
            if whole > 0:
                advance(whole)

    return Bar


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_SHOWN]


@contextmanager
def pretrained_download(
    name: str, address: str, *, advice: str = "give --weights FILE, or --random-weights for a sanity check"
) -> Iterator[None]:
    """Inside, pretrained weights are downloaded or read from the cache; advice: what to do instead, at the error's end.

    Offline, and without a network, where the hub's client retries for most of a minute, only the cache is read, and
    weights that are not cached raise ModelError.
    """
    is_offline = constants.HF_HUB_OFFLINE
    online = not is_offline and _answers(address)
    before, level = constants.HF_HUB_OFFLINE, logging.getLogger("huggingface_hub").level
    constants.HF_HUB_OFFLINE = before or not online
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    except (OSError, HTTPException, RuntimeError) as error:
        reason = f"the download failed ({_first_line(error)})" if online else "found no network"
        reason = "found neither, offline" if is_offline else reason
        raise ModelError(
            f"expected pretrained weights of {name} from {address} or the cache, {reason}; {advice}"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before
        logging.getLogger("huggingface_hub").setLevel(level)


def _answers(address: str) -> bool:
    request = urllib.request.Request(address, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT):
            return True
    except urllib.error.HTTPError:
        return True  # the server refused this page, so there is a network
    except (OSError, HTTPException):
        return False

"""Pretrained weights over the network: quick to say when there is none."""

import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException

from huggingface_hub import constants

from vitlens.errors import ModelError

TIMEOUT = 5  # seconds for the first answer; a hub that is there answers in one


@contextmanager
def pretrained_download(name: str, address: str) -> Iterator[None]:
    """A place to download pretrained weights in, or to find them in the cache.

    Without a network the hub's own client retries for most of a minute; here the cache alone is asked then, and
    what is not in it is one ModelError that says what was tried.
    """
    online = _answers(address)
    before, level = constants.HF_HUB_OFFLINE, logging.getLogger("huggingface_hub").level
    constants.HF_HUB_OFFLINE = before or not online
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    except (OSError, HTTPException, RuntimeError) as error:
        reason = "found no network" if not online else f"the download failed ({str(error).splitlines()[0][:120]})"
        raise ModelError(
            f"expected pretrained weights of {name} from {address} or the cache, {reason}; "
            "give --weights FILE, or --random-weights for a sanity check"
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
        return True  # it refused this page, so it is there
    except (OSError, HTTPException):
        return False

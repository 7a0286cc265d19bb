"""Downloads of pretrained weights, with a short timeout where there is no network."""

import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException

from huggingface_hub import constants

from vitlens.errors import ModelError

TIMEOUT = 5  # seconds until the first response; usually there within one


@contextmanager
def pretrained_download(
    name: str, address: str, *, advice: str = "give --weights FILE, or --random-weights for a sanity check"
) -> Iterator[None]:
    """Inside, pretrained weights are downloaded or read from the cache; advice: what to do instead, at the error's end.

    Without a network the hub's client retries for most of a minute; here only the cache is read, and weights that are
    not cached raise ModelError.
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

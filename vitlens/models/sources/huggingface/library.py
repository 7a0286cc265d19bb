"""transformers, an optional dependency: imported when it is needed, without its bars, its log and its warnings."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from vitlens.errors import ModelError
from vitlens.startup import import_without_compiler

MAJOR: Final = 5  # earlier versions need an older huggingface_hub than other libraries do


def transformers(part: str = "") -> Any:
    """The library, or one of its modules. Raises ModelError where it is missing or older than 5."""
    try:
        library: Any = import_without_compiler("transformers")
        if int(str(library.__version__).partition(".")[0]) < MAJOR:
            raise ImportError(f"version {library.__version__}")
        return import_without_compiler(f"transformers.{part}") if part else library
    except ImportError as error:
        raise ModelError(
            f"expected transformers {MAJOR} or newer for hf: models, found it missing ({error}); "
            "type pip install 'vitlens[hf]'"
        ) from error


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, transformers and the hub's client print nothing and send no telemetry; their settings are restored."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    log, telemetry, bars = transformers("utils.logging"), constants.HF_HUB_DISABLE_TELEMETRY, _bars_shown()
    hub_bars = not are_progress_bars_disabled()
    level, hub_log = log.get_verbosity(), logging.getLogger("huggingface_hub")
    hub_level = hub_log.level
    try:
        log.set_verbosity(logging.CRITICAL)
        hub_log.setLevel(logging.CRITICAL)
        log.disable_progress_bar()
        constants.HF_HUB_DISABLE_TELEMETRY = True
        if hub_bars:
            disable_progress_bars()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        hub_log.setLevel(hub_level)
        constants.HF_HUB_DISABLE_TELEMETRY = telemetry
        if bars:
            log.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()


def _bars_shown() -> bool:
    return bool(transformers("utils.logging").is_progress_bar_enabled())

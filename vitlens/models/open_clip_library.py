"""What open_clip knows: its architectures, the weights there are and how they were trained, templates, tokenizers.

The one place that imports open_clip: an extra, asked for when it is needed.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

from vitlens.errors import ModelError
from vitlens.models.hub import pretrained_download
from vitlens.models.language_image import Tokenizer

PREFIX: Final = "open-clip:"
ADDRESS: Final = "https://huggingface.co"
_TRAINED = ("mean", "std", "interpolation", "resize_mode")


def open_clip(part: str = "") -> Any:
    """The library, or one of its modules. Raises ModelError where it is not installed."""
    try:
        with quietly():
            return import_module(f"open_clip.{part}" if part else "open_clip")
    except ImportError as error:
        raise ModelError(
            f"expected open_clip for language and image models, found it missing ({error}); "
            "type pip install 'vitlens[clip]'"
        ) from error


def open_clip_names() -> list[str]:
    """Every ARCH/TAG that open_clip has weights of; none where the extra is not installed."""
    try:
        library = open_clip()
    except ModelError:
        return []
    return sorted(f"{arch}/{tag}" for arch, tag in library.list_pretrained())


def template_sets() -> Mapping[str, tuple[str, ...]]:
    """open_clip's templates by name, with {} in place of the class: "simple" (7) and "openai" (80, Radford 2021)."""
    library = open_clip()
    known = {"simple": library.SIMPLE_IMAGENET_TEMPLATES, "openai": library.OPENAI_IMAGENET_TEMPLATES}
    return {name: tuple(str(one("{}")) for one in found) for name, found in known.items()}


def imagenet_prompt_names() -> tuple[str, ...]:
    """ImageNet's 1000 classes in words that a text tower understands, in the order of the logits."""
    return tuple(open_clip().IMAGENET_CLASSNAMES)


def configuration(arch: str, tag: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """How weights were trained: quick_gelu, mean, std, interpolation, resize_mode; and what is to be said of it.

    Without a tag: what all weights of the architecture share, else open_clip's default.
    """
    library = open_clip()
    own = bool((library.get_model_config(arch) or {}).get("quick_gelu", False))
    if tag is not None:
        known = library.get_pretrained_cfg(arch, tag)
        quick = bool(known.get("quick_gelu", False))
        says = f"{'QuickGELU' if quick else 'GELU'}, as the weights {tag!r} were trained with"
        notes = (says,) if quick != own else ()
        return {"quick_gelu": quick, **{key: known[key] for key in _TRAINED if key in known}}, notes
    each = [library.get_pretrained_cfg(arch, one) for one in library.list_pretrained_tags_by_model(arch)]
    shared = {key: each[0][key] for key in _TRAINED if each and all(one.get(key) == each[0].get(key) for one in each)}
    notes = () if len(shared) == len(_TRAINED) else ("preprocessing by open_clip's default: no weights say theirs",)
    return {"quick_gelu": own, **shared}, notes


def context_length(arch: str) -> int:
    """How many tokens a text may have."""
    return int(_of_texts(arch).get("context_length", 77))


def tokenizer(arch: str) -> Tokenizer:
    """The architecture's own. SigLIP's and some others' are fetched from the hub once, and need transformers."""
    library = open_clip()
    if not _of_texts(arch).get("hf_tokenizer_name"):
        own: Tokenizer = library.get_tokenizer(arch)
        return own
    whose = f"the tokenizer of {PREFIX}{arch}"
    try:
        with pretrained_download(whose, ADDRESS), quietly():
            fetched: Tokenizer = library.get_tokenizer(arch)
            return fetched
    except ModelError as error:
        reason = str(error.__cause__ or error).splitlines()[0][:120]
        raise ModelError(
            f"expected {whose} from {ADDRESS} or the cache, found: {reason}; a network is needed once"
        ) from error
    except (AttributeError, ImportError, NameError, TypeError) as error:  # what open_clip raises without transformers
        raise ModelError(
            f"expected transformers for {whose}, found it missing ({error}); type pip install transformers"
        ) from error


def _of_texts(arch: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (open_clip().get_model_config(arch) or {}).get("text_cfg", {})
    return found


@contextmanager
def quietly() -> Iterator[None]:
    """open_clip writes to the log what we say in the report, and warns of a QuickGELU that we have settled."""
    root, before = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.setLevel(before)

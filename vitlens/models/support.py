"""What a command needs of a model, and why a model cannot do what a command does.

A need is checked by the function that the command itself would fail in, so that what is listed, what is refused and
what works are one thing. Those functions lie above the models; the table names them, and they are found when asked.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final, Literal, get_args
from weakref import WeakKeyDictionary

from vitlens.errors import LensError, UnknownNameError, UnsupportedError
from vitlens.models.language_image import LanguageImage
from vitlens.models.specimen import Specimen
from vitlens.names import CommandName

Need = Literal["classifier", "new head", "attention", "maps", "chain", "statistics", "heads", "features", "cam"]

CHECKS: Final[Mapping[Need, str]] = MappingProxyType(
    {  # module:function of a specimen, which raises UnsupportedError
        "classifier": "vitlens.models.support:require_classifier",
        "new head": "vitlens.models.new_head:require_replaceable",
        "attention": "vitlens.analysis.attention:require_attention",
        "maps": "vitlens.analysis.attention:require_maps",
        "chain": "vitlens.analysis.chain:require_chain",
        "statistics": "vitlens.analysis.stats:require_statistics",
        "heads": "vitlens.analysis.ablate:require_heads",
        "features": "vitlens.lens.stages:stages",
        "cam": "vitlens.attribution.place:cam_place",
    }
)
NEEDS: Final[Mapping[CommandName, tuple[Need, ...]]] = MappingProxyType(
    {  # every command that takes a model
        "study": ("classifier", "maps", "chain", "statistics", "heads", "features"),
        "predict": ("classifier",),
        "train": ("new head",),
        "evaluate": ("classifier",),
        "attention": ("maps",),
        "rollout": ("chain",),
        "stats": ("statistics",),
        "ablate": ("classifier", "heads"),
        "compare": ("classifier",),
        "explain": ("classifier",),
        "attack": ("classifier",),
        "features": ("features",),
        "profile": (),
    }
)
_found: WeakKeyDictionary[Specimen, dict[Need, str]] = WeakKeyDictionary()


def unsupported(specimen: Specimen, command: CommandName) -> str | None:
    """Why a specimen cannot do what a command does, and which commands it supports; None where it can.

    Of its weights nothing is asked but that they are there: shapes decide, so that one on the meta device will do.
    Raises UnknownNameError for a command that takes no model.
    """
    if command not in NEEDS:
        raise UnknownNameError("command that takes a model", command, NEEDS, hint="vitlens --help")
    return _first(specimen, NEEDS[command])


def supported(specimen: Specimen) -> tuple[CommandName, ...]:
    """The commands that a specimen supports, in their order."""
    return tuple(command for command, needs in NEEDS.items() if all(meets(specimen, need) for need in needs))


def require(specimen: Specimen, *needs: Need) -> None:
    """Raise UnsupportedError, with the reason that `unsupported` gives, where one of the needs is not met."""
    reason = _first(specimen, needs)
    if reason is not None:
        raise UnsupportedError(reason)


def require_supported(specimen: Specimen, command: CommandName) -> None:
    """Raise UnsupportedError, with its reason, where the specimen cannot do what the command does."""
    require(specimen, *NEEDS[command])


def meets(specimen: Specimen, need: Need) -> bool:
    """Whether a need is met."""
    return not _why_not(specimen, need)


def has_classifier(specimen: Specimen) -> bool:
    """Whether its outputs are logits of classes, not features: timm's num_classes=0, open_clip's without prompts."""
    if isinstance(specimen.model, LanguageImage):
        return specimen.model.prompts is not None
    return getattr(specimen.model, "num_classes", None) != 0


def require_classifier(specimen: Specimen) -> None:
    """Raise UnsupportedError for a model without a classifier."""
    if not has_classifier(specimen):
        raise UnsupportedError(
            f"expected a classifier in {specimen.alias}, found none: its {len(specimen.classes)} outputs are features"
        )


def _first(specimen: Specimen, needs: tuple[Need, ...]) -> str | None:
    why = next(filter(None, (_why_not(specimen, need) for need in needs)), None)
    if why is None:
        return None
    return f"{why}; {specimen.alias} supports {', '.join(supported(specimen))}"


def _why_not(specimen: Specimen, need: Need) -> str:
    """Why a need is not met, "" where it is; looked for once and remembered."""
    known = _found.setdefault(specimen, {})
    if need not in known:
        module, _, name = CHECKS[need].partition(":")
        check: Callable[[Specimen], object] = getattr(import_module(module), name)
        try:
            check(specimen)
            known[need] = ""
        except (LensError, UnsupportedError) as error:
            known[need] = str(error)
    return known[need]


assert set(CHECKS) == set(get_args(Need))

"""What a command needs of a model, and why a model cannot do what a command does.

A need is checked by the function that the command itself would fail in, so that what is listed, what is refused and
what works are one thing. Those functions lie above the models; the table names them, and they are found when asked.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final, Literal, get_args
from weakref import WeakKeyDictionary

from vitlens.errors import LensError, UnknownNameError, UnsupportedError
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
        "explain": (),
        "attack": ("classifier",),
        "features": ("features",),
        "profile": (),
    }
)
_LIST = " supports "  # before the commands that a model supports
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
    return tuple(command for command, needs in NEEDS.items() if _meets_all(specimen, needs))


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


def require_classifier(specimen: Specimen) -> None:
    """Raise UnsupportedError, with what works without a classifier and how to add one, where it has none."""
    if specimen.has_classifier:
        return
    if specimen.architecture["kind"] == "open-clip":
        advice = "name the classes with --classes FILE (vitlens.zero_shot in Python)"
    else:
        advice = f"add a head with vitlens train {specimen.provenance.name} --freeze-backbone --data DATA"
    works = (command for command, needs in NEEDS.items() if "classifier" not in needs and _meets_all(specimen, needs))
    raise UnsupportedError(
        f"expected logits of classes, found features: {specimen.alias} has no classifier; {advice}; "
        f"{_listed(specimen, works)}"
    )


def _meets_all(specimen: Specimen, needs: Iterable[Need]) -> bool:
    return all(meets(specimen, need) for need in needs)


def _first(specimen: Specimen, needs: tuple[Need, ...]) -> str | None:
    for need in needs:
        why = _why_not(specimen, need)
        if why:
            return why if _LIST in why else f"{why}; {_listed(specimen, supported(specimen))}"
    return None


def _listed(specimen: Specimen, commands: Iterable[CommandName]) -> str:
    return f"{specimen.alias}{_LIST}{', '.join(commands)}"


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

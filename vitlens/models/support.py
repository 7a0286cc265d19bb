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
from vitlens.models.model import Model
from vitlens.names import CommandName

Need = Literal["classifier", "new head", "attention", "maps", "chain", "statistics", "heads", "features", "cam"]

CHECKS: Final[Mapping[Need, str]] = MappingProxyType(
    {  # module:function of a model, which raises UnsupportedError
        "classifier": "vitlens.models.support:require_classifier",
        "new head": "vitlens.models.new_head:require_replaceable",
        "attention": "vitlens.analysis.attention.weights:require_attention",
        "maps": "vitlens.analysis.attention.weights:require_maps",
        "chain": "vitlens.analysis.attention.chain:require_chain",
        "statistics": "vitlens.analysis.heads.statistics:require_statistics",
        "heads": "vitlens.analysis.ablation.ablate:require_heads",
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
_found: WeakKeyDictionary[Model, dict[Need, str]] = WeakKeyDictionary()


def unsupported(model: Model, command: CommandName) -> str | None:
    """Why a model cannot do what a command does, and which commands it supports; None where it can.

    Of its weights nothing is asked but that they are there: shapes decide, so that one on the meta device will do.
    Raises UnknownNameError for a command that takes no model.
    """
    if command not in NEEDS:
        raise UnknownNameError("command that takes a model", command, NEEDS, hint="vitlens --help")
    return _first(model, NEEDS[command])


def supported(model: Model) -> tuple[CommandName, ...]:
    """The commands that a model supports, in their order."""
    return tuple(command for command, needs in NEEDS.items() if _meets_all(model, needs))


def require(model: Model, *needs: Need) -> None:
    """Raise UnsupportedError, with the reason that `unsupported` gives, where one of the needs is not met."""
    reason = _first(model, needs)
    if reason is not None:
        raise UnsupportedError(reason)


def require_supported(model: Model, command: CommandName) -> None:
    """Raise UnsupportedError, with its reason, where the model cannot do what the command does."""
    require(model, *NEEDS[command])


def meets(model: Model, need: Need) -> bool:
    """Whether a need is met."""
    return not _why_not(model, need)


def require_classifier(model: Model) -> None:
    """Raise UnsupportedError, with what works without a classifier and how to add one, where it has none."""
    if model.has_classifier:
        return
    if model.architecture["kind"] == "open-clip":
        advice = "name the classes with --classes FILE (vitlens.zero_shot in Python)"
    else:
        advice = f"add a head with vitlens train {model.provenance.name} --freeze-backbone --data DATA"
    works = (command for command, needs in NEEDS.items() if "classifier" not in needs and _meets_all(model, needs))
    raise UnsupportedError(
        f"expected logits of classes, found features: {model.alias} has no classifier; {advice}; "
        f"{_listed(model, works)}"
    )


def _meets_all(model: Model, needs: Iterable[Need]) -> bool:
    return all(meets(model, need) for need in needs)


def _first(model: Model, needs: tuple[Need, ...]) -> str | None:
    for need in needs:
        why = _why_not(model, need)
        if why:
            return why if _LIST in why else f"{why}; {_listed(model, supported(model))}"
    return None


def _listed(model: Model, commands: Iterable[CommandName]) -> str:
    return f"{model.alias}{_LIST}{', '.join(commands)}"


def _why_not(model: Model, need: Need) -> str:
    """Why a need is not met, "" where it is; looked for once and remembered."""
    known = _found.setdefault(model, {})
    if need not in known:
        module, _, name = CHECKS[need].partition(":")
        check: Callable[[Model], object] = getattr(import_module(module), name)
        try:
            check(model)
            known[need] = ""
        except (LensError, UnsupportedError) as error:
            known[need] = str(error)
    return known[need]


assert set(CHECKS) == set(get_args(Need))

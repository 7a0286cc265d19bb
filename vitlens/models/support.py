"""What each command requires of a model, why a model does not support a command, and what a model's repr says.

A need is checked by the function in which the command itself would fail, so that listing, refusals and behaviour agree.
Those functions are in higher layers; the table refers to them as module:function.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from vitlens.errors import LensError, UnknownNameError, UnsupportedError
from vitlens.models.hooks import per_model
from vitlens.models.language_image import has_text_tower
from vitlens.models.model import Model
from vitlens.models.sources.registry import SOURCES
from vitlens.references import resolved

Need = Literal[
    "classifier",
    "new head",
    "attention",
    "maps",
    "chain",
    "statistics",
    "heads",
    "features",
    "cam",
    "depths",
    "walkthrough",
]

CHECKS: Final[Mapping[Need, str]] = MappingProxyType(
    {  # module:function that takes a model and raises UnsupportedError
        "classifier": "vitlens.models.support:require_classifier",
        "new head": "vitlens.models.rebuild:require_replaceable",
        "attention": "vitlens.analysis.attention.weights:require_attention",
        "maps": "vitlens.analysis.attention.weights:require_maps",
        "chain": "vitlens.analysis.attention.chain:require_chain",
        "statistics": "vitlens.analysis.heads.statistics:require_statistics",
        "heads": "vitlens.analysis.ablation.units:require_heads",
        "features": "vitlens.lens.stages:stages",
        "cam": "vitlens.attribution.target_layer:target_layer",
        "depths": "vitlens.attribution.legrad:require_legrad",
        "walkthrough": "vitlens.analysis.walkthrough.public:require_walkthrough",
    }
)
_CLASSES: Final = 4  # names shown in a repr
_SUPPORTS = " supports "  # precedes the supported commands at the end of every reason


def _commands() -> Mapping[str, Any]:
    """The command registry, which is in a higher layer."""
    commands: Mapping[str, Any] = resolved("vitlens.commands.registry:COMMANDS")
    return commands


def needs_of(command: str) -> tuple[Need, ...]:
    """The needs of a command. Raises UnknownNameError for a command that takes no model."""
    if command not in model_commands():
        raise UnknownNameError("command that takes a model", command, model_commands(), hint="vitlens --help")
    needs: tuple[Need, ...] = _commands()[command].needs
    return needs


def model_commands() -> tuple[str, ...]:
    """The commands that take a model, in their order."""
    return tuple(word for word, command in _commands().items() if command.needs is not None)


def without_weights() -> tuple[str, ...]:
    """The commands that need no trained weights."""
    return tuple(word for word, command in _commands().items() if command.untrained)


def unsupported(model: Model, command: str) -> str | None:
    """Why a model does not support a command, and which commands it supports; None where it does.

    Only shapes matter, so the model may be on the meta device. Raises UnknownNameError for a command that takes no
    model.
    """
    return _first_reason(model, needs_of(command))


def supported(model: Model) -> tuple[str, ...]:
    """The commands that a model supports, in their order."""
    return tuple(command for command in model_commands() if _meets_all(model, needs_of(command)))


def require(model: Model, *needs: Need) -> None:
    """Raise UnsupportedError, with the reason that `unsupported` gives, where one of the needs is not met."""
    reason = _first_reason(model, needs)
    if reason is not None:
        raise UnsupportedError(reason)


def require_supported(model: Model, command: str) -> None:
    """Raise UnsupportedError, with the reason, where the model does not support the command."""
    require(model, *needs_of(command))


def meets(model: Model, need: Need) -> bool:
    """Whether a model meets a need."""
    return not _why_not(model, need)


def checked_needs(model: Model) -> dict[str, bool]:
    """Whether the needs are met that have been checked for this model, or follow without a forward pass."""
    found = {need: _why_not.memo.known(model, ((need,), ())) for need in CHECKS}
    return {"classifier": model.has_classifier} | {need: not why for need, why in found.items() if why is not None}


def require_classifier(model: Model) -> None:
    """Raise UnsupportedError, with the commands that need no classifier and how to add one, where it has none."""
    if model.has_classifier:
        return
    if has_text_tower(model):
        advice = "name the classes with --classes FILE (vitlens.zero_shot in Python)"
    else:
        advice = f"add a head with vitlens train {model.provenance.name} --freeze-backbone --data DATA"
    needs = {command: needs_of(command) for command in model_commands()}
    able = (command for command, each in needs.items() if "classifier" not in each and _meets_all(model, each))
    raise UnsupportedError(
        f"expected logits of classes, found features: {model.alias} has no classifier; {advice}; "
        f"{_supports(model, able)}"
    )


def _meets_all(model: Model, needs: Iterable[Need]) -> bool:
    return all(meets(model, need) for need in needs)


def _first_reason(model: Model, needs: tuple[Need, ...]) -> str | None:
    for need in needs:
        why = _why_not(model, need)
        if why:
            return why if _SUPPORTS in why else f"{why}; {_supports(model, supported(model))}"
    return None


def _supports(model: Model, commands: Iterable[str]) -> str:
    return f"{model.alias}{_SUPPORTS}{', '.join(commands)}"


@per_model
def _why_not(model: Model, need: Need) -> str:
    """Why a need is not met; "" where it is."""
    try:
        resolved(CHECKS[need])(model)
    except (LensError, UnsupportedError) as error:
        return str(error)
    return ""


def description(model: Model) -> list[tuple[str, str]]:
    """Names and values: family, source, input, classes, blocks and heads, parameters, normalisation, supports."""
    anatomy, preprocessing = model.anatomy, model.preprocessing
    height, width = model.input_size
    rows = [
        ("family", anatomy.family),
        ("source", _source(model)),
        ("input", f"{height} x {width} px, in [0, 1]"),
        ("normalisation", f"mean {_triple(preprocessing.mean)}, std {_triple(preprocessing.std)}, inside the model"),
        ("classes", _classes(model.classes)),
        ("blocks", _blocks(model)),
    ]
    if anatomy.layout is not None:
        down, across = anatomy.layout.grid
        prefix = f" after {', '.join(anatomy.layout.prefix)}" if anatomy.layout.prefix else ""
        rows.append(("tokens", f"{down} x {across} patches{prefix}"))
    rows += [("parameters", f"{model.parameter_count():,}"), ("device", str(model.device)), *_supported_rows(model)]
    return rows


def _source(model: Model) -> str:
    provenance = model.provenance
    kind = str(model.architecture.get("kind", ""))
    library = f" ({kind})" if kind in SOURCES and not provenance.name.startswith(kind) else ""
    return f"{provenance.name}{library}, weights: {provenance.weights}"


def _classes(names: tuple[str, ...]) -> str:
    if not names:
        return "none: its outputs are features"
    more = f" and {len(names) - _CLASSES} more" if len(names) > _CLASSES else ""
    return f"{len(names)}: {', '.join(names[:_CLASSES])}{more}"


def _blocks(model: Model) -> str:
    """The number of blocks, and of heads."""
    heads = sorted({model.anatomy.parts[name].heads for name in model.anatomy.attention_modules})
    words = f", {' or '.join(map(str, heads))} heads each" if heads else ""
    return f"{len(model.anatomy.blocks)}{words}"


def _supported_rows(model: Model) -> list[tuple[str, str]]:
    """The commands whose needs are known to be met, and those not checked yet, as that would take a forward pass."""
    met = checked_needs(model)
    known = [word for word in model_commands() if all(met.get(need, False) for need in needs_of(word))]
    open_ones = [word for word in model_commands() if any(need not in met for need in needs_of(word))]
    rows = [("supports", ", ".join(known))]
    return [*rows, ("not checked", ", ".join(open_ones))] if open_ones else rows


def _triple(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


assert set(CHECKS) == set(get_args(Need))

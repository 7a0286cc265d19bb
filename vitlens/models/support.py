"""What each command requires of a model, why a model does not support a command, and what a model's repr shows.

A need is checked by the function in which the command itself would fail, so that listing, refusals and behaviour agree.
Those functions are in higher layers; the table refers to them as module:function.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from vitlens.errors import LensError, UnknownNameError, UnsupportedError, argument
from vitlens.models.hooks import Memo
from vitlens.models.language_image import has_text_tower
from vitlens.models.model import Model
from vitlens.models.numbering import numbers_text
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
        "heads": "vitlens.analysis.ablation.bench:require_heads",
        "features": "vitlens.lens.stages:stages",
        "cam": "vitlens.attribution.cam:target_layer",
        "depths": "vitlens.attribution.legrad:require_legrad",
        "walkthrough": "vitlens.analysis.walkthrough.public:require_walkthrough",
    }
)
_CLASSES: Final = 4  # names shown in a repr
_SUPPORTS = " supports "  # precedes the supported commands at the end of every reason
_REASONS: Final[Memo[str]] = Memo()  # why a need is not met


def _needs_by_command() -> Mapping[str, tuple[Need, ...]]:
    """Return the needs of the commands that take a model, in their order, from the registry in a higher layer."""
    registry: Mapping[str, Any] = resolved("vitlens.commands.registry:COMMANDS")
    return {name: command.needs for name, command in registry.items() if command.needs is not None}


def needs_of(command: str) -> tuple[Need, ...]:
    """Return the needs of a command. Raises UnknownNameError for a command that takes no model."""
    needs_by_command = _needs_by_command()
    if command not in needs_by_command:
        raise UnknownNameError("command that takes a model", command, tuple(needs_by_command), hint="vitlens --help")
    return needs_by_command[command]


def supported(model: Model) -> tuple[str, ...]:
    """Return the commands that a model supports, in their order. Only shapes matter: it may be on the meta device."""
    commands = []
    for command, needs in _needs_by_command().items():
        if all(meets(model, need) for need in needs):
            commands.append(command)
    return tuple(commands)


def meets(model: Model, need: Need) -> bool:
    """Return True if a model meets a need."""
    return not why_not(model, need)


def unsupported(model: Model, *needs: Need) -> str | None:
    """Return why a model does not meet one of the needs, and which commands it supports; None where it meets all."""
    for need in needs:
        reason = why_not(model, need)
        if reason:
            if _SUPPORTS in reason:
                return reason
            return f"{reason}; {_supports(model, supported(model))}"
    return None


def require(model: Model, *needs: Need) -> None:
    """Raise UnsupportedError, with the reason that `unsupported` gives, where one of the needs is not met."""
    reason = unsupported(model, *needs)
    if reason is not None:
        raise UnsupportedError(reason)


def require_classifier(model: Model) -> None:
    """Raise UnsupportedError, with the commands that need no classifier and how to add one, where it has none."""
    if model.has_classifier:
        return
    if has_text_tower(model):
        advice = f"name the classes with {argument('classes', flag='classes FILE')} (vitlens.zero_shot in Python)"
    else:
        advice = f"add a head with vitlens train {model.provenance.name} --freeze-backbone --data DATA"
    commands = []
    for command, needs in _needs_by_command().items():
        if "classifier" not in needs and all(meets(model, need) for need in needs):
            commands.append(command)
    raise UnsupportedError(
        f"expected logits of classes, found features: {model.alias} has no classifier; {advice}; "
        f"{_supports(model, commands)}"
    )


def _supports(model: Model, commands: Iterable[str]) -> str:
    return f"{model.alias}{_SUPPORTS}{', '.join(commands)}"


def why_not(model: Model, need: Need) -> str:
    """Return why a need is not met; "" where it is."""

    def check() -> str:
        try:
            resolved(CHECKS[need])(model)
        except (LensError, UnsupportedError) as error:
            return str(error)
        return ""

    return _REASONS.get(model, check, key=need)


def description(model: Model) -> list[tuple[str, str]]:
    """Return what a model's repr shows, as names and values.

    Family, source, input, normalisation, classes, blocks and heads, parameters, supported commands. Commands whose
    needs have not been checked yet, as that would take a forward pass, are listed apart.
    """
    height, width = model.input_size
    rows = [
        ("family", model.anatomy.family),
        ("source", _describe_source(model)),
        ("input", f"{height} x {width} px, in [0, 1]"),
        ("photographs", model.preprocessing.rule),
        ("normalisation", _describe_normalisation(model)),
        ("classes", _describe_classes(model.classes)),
        ("blocks", _describe_blocks(model)),
    ]
    layout = model.anatomy.layout
    if layout is not None:
        down, across = layout.grid
        prefix = f" after {', '.join(layout.prefix)}" if layout.prefix else ""
        rows.append(("tokens", f"{down} x {across} patches{prefix}"))
    elif model.anatomy.unread:
        rows.append(("not read", model.anatomy.unread))
    supported_commands, unchecked = _checked_commands(model)
    rows.append(("parameters", f"{model.parameter_count():,}"))
    rows.append(("device", str(model.device)))
    rows.append(("supports", ", ".join(supported_commands)))
    rows += [("note", note) for note in model.provenance.notes]
    if unchecked:
        rows.append(("not checked", ", ".join(unchecked)))
    return rows


def _describe_source(model: Model) -> str:
    provenance = model.provenance
    kind = str(model.architecture.get("kind", ""))
    library = f" ({kind})" if kind in SOURCES and not provenance.name.startswith(kind) else ""
    return f"{provenance.name}{library}, weights: {provenance.weights}"


def _describe_normalisation(model: Model) -> str:
    mean = ", ".join(f"{value:g}" for value in model.preprocessing.mean)
    std = ", ".join(f"{value:g}" for value in model.preprocessing.std)
    return f"mean {mean}, std {std}, inside the model"


def _describe_classes(classes: Sequence[str]) -> str:
    if not classes:
        return "none: its outputs are features"
    text = f"{len(classes)}: {', '.join(classes[:_CLASSES])}"
    if len(classes) > _CLASSES:
        text += f" and {len(classes) - _CLASSES} more"
    return text


def _describe_blocks(model: Model) -> str:
    anatomy = model.anatomy
    text = f"{len(anatomy.blocks)}"
    counts = sorted({anatomy.parts[name].heads for name in anatomy.attention_modules})
    if counts:
        text += f", {' or '.join(map(str, counts))} heads each"
    if anatomy.without_attention:
        text += f", with attention {numbers_text([*anatomy.attention_by_layer], joined_by='and')}"
    return text


def _checked_commands(model: Model) -> tuple[list[str], list[str]]:
    """Return the supported commands, and those with needs not checked yet, without checking any need."""
    is_met: dict[str, bool] = {}
    for need in CHECKS:
        reason = _REASONS.known(model, need)
        if reason is not None:
            is_met[need] = not reason
    is_met["classifier"] = model.has_classifier
    supported_commands = []
    unchecked = []
    for command, needs in _needs_by_command().items():
        if all(is_met.get(need, False) for need in needs):
            supported_commands.append(command)
        if any(need not in is_met for need in needs):
            unchecked.append(command)
    return supported_commands, unchecked


assert set(CHECKS) == set(get_args(Need))

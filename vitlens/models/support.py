"""What each command requires of a model, why a model does not support a command, and what a model's repr says.

A need is checked by the function in which the command itself would fail, so that listing, refusals and behaviour agree.
Those functions are in higher layers; the table refers to them as module:function.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from vitlens.errors import LensError, UnknownNameError, UnsupportedError, argument
from vitlens.models.hooks import Memo
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


def _commands() -> Mapping[str, Any]:
    """Return the commands that take a model, in their order, from the registry in a higher layer."""
    registry: Mapping[str, Any] = resolved("vitlens.commands.registry:COMMANDS")
    return {word: command for word, command in registry.items() if command.needs is not None}


def needs_of(command: str) -> tuple[Need, ...]:
    """Return the needs of a command. Raises UnknownNameError for a command that takes no model."""
    known = _commands()
    if command not in known:
        raise UnknownNameError("command that takes a model", command, tuple(known), hint="vitlens --help")
    needs: tuple[Need, ...] = known[command].needs
    return needs


def supported(model: Model) -> tuple[str, ...]:
    """Return the commands that a model supports, in their order. Only shapes matter: it may be on the meta device."""
    return tuple(word for word, command in _commands().items() if all(meets(model, need) for need in command.needs))


def meets(model: Model, need: Need) -> bool:
    """Return True if a model meets a need."""
    return not why_not(model, need)


def unsupported(model: Model, *needs: Need) -> str | None:
    """Return why a model does not meet one of the needs, and which commands it supports; None where it meets all."""
    why = next((why for why in (why_not(model, need) for need in needs) if why), None)
    return f"{why}; {_supports(model, supported(model))}" if why and _SUPPORTS not in why else why


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
    needs = {word: command.needs for word, command in _commands().items() if "classifier" not in command.needs}
    able = (word for word, each in needs.items() if all(meets(model, need) for need in each))
    raise UnsupportedError(
        f"expected logits of classes, found features: {model.alias} has no classifier; {advice}; "
        f"{_supports(model, able)}"
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
    """Names and values: family, source, input, normalisation, classes, blocks and heads, parameters, what it supports.

    Commands whose needs have not been checked yet, as that would take a forward pass, are listed apart.
    """
    anatomy, provenance, (height, width) = model.anatomy, model.provenance, model.input_size
    kind = str(model.architecture.get("kind", ""))
    library = f" ({kind})" if kind in SOURCES and not provenance.name.startswith(kind) else ""
    normalisation = (model.preprocessing.mean, model.preprocessing.std)
    mean, std = (", ".join(f"{value:g}" for value in each) for each in normalisation)
    more = f" and {len(model.classes) - _CLASSES} more" if len(model.classes) > _CLASSES else ""
    classes = f"{len(model.classes)}: {', '.join(model.classes[:_CLASSES])}{more}"
    heads = " or ".join(map(str, sorted({anatomy.parts[name].heads for name in anatomy.attention_modules})))
    rows = [
        ("family", anatomy.family),
        ("source", f"{provenance.name}{library}, weights: {provenance.weights}"),
        ("input", f"{height} x {width} px, in [0, 1]"),
        ("photographs", model.preprocessing.rule),
        ("normalisation", f"mean {mean}, std {std}, inside the model"),
        ("classes", classes if model.classes else "none: its outputs are features"),
        ("blocks", f"{len(anatomy.blocks)}" + (f", {heads} heads each" if heads else "")),
    ]
    if anatomy.layout is not None:
        down, across = anatomy.layout.grid
        prefix = f" after {', '.join(anatomy.layout.prefix)}" if anatomy.layout.prefix else ""
        rows.append(("tokens", f"{down} x {across} patches{prefix}"))
    elif anatomy.unread:
        rows.append(("not read", anatomy.unread))
    found = {need: _REASONS.known(model, need) for need in CHECKS}
    met = {need: not why for need, why in found.items() if why is not None} | {"classifier": model.has_classifier}
    needs = {word: command.needs for word, command in _commands().items()}
    known = [word for word, each in needs.items() if all(met.get(need, False) for need in each)]
    unchecked = [word for word, each in needs.items() if any(need not in met for need in each)]
    rows += [("parameters", f"{model.parameter_count():,}"), ("device", str(model.device))]
    rows.append(("supports", ", ".join(known)))
    rows += [("note", note) for note in provenance.notes]
    return [*rows, ("not checked", ", ".join(unchecked))] if unchecked else rows


assert set(CHECKS) == set(get_args(Need))

"""What each command needs of a model, and which commands a model supports.

A need is a name in REQUIREMENTS, for the requirement of the function that would refuse the model.
So lists of commands, refusals and behaviour agree. The needs of a command are in its entry of the
registry.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.registry import COMMANDS
from vitlens.errors import UnknownNameError, UnsupportedError
from vitlens.models.model import Model
from vitlens.models.requirement import Requirement, checked_requirement, refusal
from vitlens.references import resolved

# by need, "module:requirement" of a `Requirement`
REQUIREMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "classifier": "vitlens.models.classifier:require_classifier",
        "classes": "vitlens.models.classifier:require_classes",
        "new head": "vitlens.models.derived:require_replaceable",
        "attention": "vitlens.analysis.attention.weights:require_attention",
        "maps": "vitlens.analysis.attention.weights:require_maps",
        "chain": "vitlens.analysis.attention.chain:require_chain",
        "statistics": "vitlens.analysis.heads.statistics:require_statistics",
        "heads": "vitlens.analysis.ablation.units:require_heads",
        "features": "vitlens.lens.stages:require_features",
        "patch tokens": "vitlens.analysis.dictionary.tokens:require_patch_tokens",
        "walkthrough": "vitlens.analysis.walkthrough.public:require_walkthrough",
    }
)


def needs_of(command: str) -> tuple[str, ...]:
    """Return the needs of a command.

    Raises UnknownNameError for a command that takes no model.
    """
    needs = _needs_by_command()
    if command not in needs:
        raise UnknownNameError(
            "command that takes a model", command, tuple(needs), hint="vitlens --help"
        )
    return needs[command]


def why_unsupported(model: Model, command: str) -> str | None:
    """Return why a model does not support a command, and which commands it supports.

    Returns None where it does. Raises UnknownNameError for a command that takes no model.
    """
    return _first_reason(model, needs_of(command))


def supported_commands(model: Model) -> tuple[str, ...]:
    """Return the commands that a model supports, in their order.

    Only shapes matter, so the model may be on the meta device.
    """
    commands = []
    for command, needs in _needs_by_command().items():
        if all(meets(model, need) for need in needs):
            commands.append(command)
    return tuple(commands)


def checked_commands(model: Model) -> tuple[list[str], list[str]]:
    """Return the commands that are supported, and those with needs that were not checked yet.

    No need is checked, as this may take a forward pass.
    """
    # True or False if the need was checked before, None if not
    is_met = {need: checked_requirement(model, need) for need in REQUIREMENTS}
    # these two need no forward pass
    is_met["classifier"] = model.has_classifier
    is_met["classes"] = len(model.classes) > 1
    supported = []
    unchecked = []
    for command, needs in _needs_by_command().items():
        if all(is_met[need] for need in needs):  # None, not checked yet, does not count as met
            supported.append(command)
        if any(is_met[need] is None for need in needs):
            unchecked.append(command)
    return supported, unchecked


def described_commands(model: Model, commands: Iterable[str]) -> tuple[str, ...]:
    """Return commands that a model supports, with the limits of those supported only in part.

    Without a classifier, `vitlens explain` has only the methods that explain no class. Nothing is
    computed.
    """
    if model.has_classifier:
        return tuple(commands)
    methods = ", ".join(_methods_without_class(model))
    described = []
    for word in commands:
        if word != "explain":
            described.append(word)
        elif methods:
            described.append(f"explain ({methods})")
    return tuple(described)


def _methods_without_class(model: Model) -> Iterator[str]:
    """Yield the attribution methods that need no class, and that the model may support."""
    for name, method in ATTRIBUTIONS.items():
        if method.needs_class or model.anatomy.family not in method.families:
            continue
        if method.needs is None or checked_requirement(model, method.needs) is not False:
            yield name


def meets(model: Model, need: str) -> bool:
    """Return True if a model meets a need."""
    return _requirement(need).is_met(model)


def require(model: Model, *needs: str) -> None:
    """Raise UnsupportedError if a model does not meet one of the needs.

    The message names the commands that it supports.
    """
    reason = _first_reason(model, needs)
    if reason is not None:
        raise UnsupportedError(reason)


def _first_reason(model: Model, needs: tuple[str, ...]) -> str | None:
    """Return the refusal for the first need that a model does not meet, None if it meets all."""
    for need in needs:
        reason = _requirement(need).reason(model)
        if reason:
            return refusal(model, reason)
    return None


def _requirement(need: str) -> Requirement:
    requirement: Requirement = resolved(REQUIREMENTS[need])
    return requirement


def _needs_by_command() -> dict[str, tuple[str, ...]]:
    """Return the needs of the commands that take a model, in their order."""
    return {word: command.needs for word, command in COMMANDS.items() if command.needs is not None}

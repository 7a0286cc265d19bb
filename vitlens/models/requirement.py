"""Requirements on models: a check that runs once for each model, and the refusal of other models.

    @requirement("attention")
    def require_attention(model: Model) -> None: ...

A function that needs attention calls `require_attention(model)`. Commands name their requirements
(commands/needs.py).
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vitlens.errors import LensError, UnsupportedError
from vitlens.models.memo import Memo
from vitlens.references import provided, resolved

if TYPE_CHECKING:
    from vitlens.models.model import Model

# why a model does not meet a requirement, by the requirement's name
_REASONS: Final[Memo[str]] = Memo()


class Requirement:
    """A requirement on models.

    A check that needs another requirement must call the `check` of that one. Calling the
    requirement itself would list the commands that the model supports, and these are found by
    checks.

    name: the name by which commands refer to it.
    check: a function that raises UnsupportedError or LensError for a model that does not meet it.
    quick: whether the check runs no forward pass. Its result is then not stored.
    """

    def __init__(self, name: str, check: "Callable[[Model], Any]", *, quick: bool = False) -> None:
        self.name = name
        self.check = check
        self.quick = quick
        self.__doc__ = check.__doc__

    def __call__(self, model: "Model") -> None:
        """Raise UnsupportedError if a model does not meet the requirement.

        The message lists the commands that the model supports.
        """
        reason = self.reason(model)
        if reason:
            raise UnsupportedError(refusal(model, reason))

    def is_met(self, model: "Model") -> bool:
        """Return True if a model meets the requirement."""
        return not self.reason(model)

    def reason(self, model: "Model") -> str:
        """Return why a model does not meet the requirement, or "" if it does."""
        if self.quick:
            return self._run_check(model)
        return _REASONS.get(model, partial(self._run_check, model), key=self.name)

    def _run_check(self, model: "Model") -> str:
        try:
            self.check(model)
        except (LensError, UnsupportedError) as error:
            return str(error)
        return ""


def requirement(
    name: str, *, quick: bool = False
) -> "Callable[[Callable[[Model], Any]], Requirement]":
    """Decorate the check of a requirement of this name.

    quick: whether the check runs no forward pass.
    """

    def decorate(check: "Callable[[Model], Any]") -> Requirement:
        return Requirement(name, check, quick=quick)

    return decorate


def checked_requirement(model: "Model", name: str) -> bool | None:
    """Return True if a model meets a requirement, None if that has not been checked yet.

    Nothing is computed.
    """
    reason = _REASONS.peek(model, name)
    return None if reason is None else not reason


def refusal(model: "Model", reason: str) -> str:
    """Return a reason followed by the commands that the model supports."""
    commands = resolved(provided("supported_commands"))(model)
    described = resolved(provided("described_commands"))(model, commands)
    return f"{reason}; {model.alias} supports {', '.join(described)}"

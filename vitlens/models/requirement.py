"""Requirements on models: a check that runs once for each model, and the refusal of a model that
does not meet it.

    @requirement("attention")
    def require_attention(model: Model) -> None: ...

A function that needs attention calls `require_attention(model)`. Commands name what they need
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

_REASONS: Final[Memo[str]] = Memo()  # why a model does not meet a requirement, by its name


class Requirement:
    """A requirement on models.

    name: as commands name it.
    check: raises UnsupportedError or LensError where a model does not meet it.
    quick: the check runs no pass through the model, and its result is not stored.

    A check calls the `check` of another requirement, as a refusal lists the commands that the model
    supports.
    """

    def __init__(self, name: str, check: "Callable[[Model], Any]", *, quick: bool = False) -> None:
        self.name = name
        self.check = check
        self.quick = quick
        self.__doc__ = check.__doc__

    def __call__(self, model: "Model") -> None:
        """Raise UnsupportedError, with the commands that the model supports, where it does not meet
        the requirement.
        """
        reason = self.reason(model)
        if reason:
            raise UnsupportedError(refusal(model, reason))

    def is_met(self, model: "Model") -> bool:
        """Return True if a model meets the requirement."""
        return not self.reason(model)

    def reason(self, model: "Model") -> str:
        """Return why a model does not meet the requirement; "" where it does."""
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
    """Decorate the check of a requirement of this name; quick: it runs no pass through the
    model."""

    def decorate(check: "Callable[[Model], Any]") -> Requirement:
        return Requirement(name, check, quick=quick)

    return decorate


def checked_requirement(model: "Model", name: str) -> bool | None:
    """Return True if a model meets a requirement, None where that has not been checked yet.

    Nothing is computed.
    """
    reason = _REASONS.peek(model, name)
    return None if reason is None else not reason


def refusal(model: "Model", reason: str) -> str:
    """Return a reason followed by the commands that the model supports."""
    commands = resolved(provided("supported_commands"))(model)
    return f"{reason}; {model.alias} supports {', '.join(commands)}"

"""The models of the page, which answer one request at a time.

A changed model must not answer another visitor, and figures are drawn one at a time.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, Final

from vitlens.commands.run.deadline import deadline, require_time
from vitlens.errors import RunError, UnknownNameError
from vitlens.models.model import Model

WAITING: Final = 90.0  # seconds that a request waits for its turn
# seconds that a request then computes; it is stopped at the next block of a model, or figure
RUNNING: Final = 60.0


class BusyError(RunError):
    """A request whose turn did not come in time."""


class OutdatedError(RunError):
    """A request that a newer one of the same visitor replaced; it has no result."""


@dataclass(frozen=True)
class Pool:
    """Models with classifiers, which one request at a time uses, in order of arrival.

    waiting: seconds that a request waits for its turn.
    running: seconds that it may compute then.
    _requests: the requests that wait, in order of arrival; the first one is computed.
    _changed: guards `_requests`, and wakes those that wait when a request leaves.

    Raises UnsupportedError for a model without a classifier.
    """

    models: tuple[Model, ...]
    waiting: float = WAITING
    running: float = RUNNING
    _requests: "deque[object]" = field(default_factory=deque, repr=False, compare=False)
    _changed: Condition = field(default_factory=Condition, repr=False, compare=False)

    def __post_init__(self) -> None:
        for model in self.models:
            model.require_classifier()

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return the models' names on the page."""
        return tuple(model.alias for model in self.models)

    def model(self, alias: str) -> Model:
        """Return the model of this alias. Raises UnknownNameError."""
        for model in self.models:
            if model.alias == alias:
                return model
        raise UnknownNameError("model on this page", str(alias), self.aliases)

    @contextmanager
    def turn(self, alias: str, is_current: Callable[[], bool] = lambda: True) -> Iterator[Model]:
        """Wait for this request's turn, then yield the model.

        is_current: returns True if no newer request has replaced this one.
        Raises BusyError after `waiting` seconds, OutdatedError for a request that is not current
        then, and inside, at a pass of the model, TooLongError after `running` seconds.
        """
        model = self.model(alias)
        request = object()  # only its identity counts
        with self._changed:
            self._requests.append(request)
        try:
            with self._changed:
                is_first = self._changed.wait_for(
                    lambda: self._requests[0] is request, timeout=self.waiting
                )
                if not is_first:
                    raise BusyError(
                        f"expected its turn within {self.waiting:.0f} s, found the page busy with "
                        "other visitors; try again"
                    )
            if not is_current():
                raise OutdatedError("expected the newest request of its tab, found an earlier one")
            with deadline(self.running), _checking_deadline(model):
                yield model
        finally:
            with self._changed:
                self._requests.remove(request)
                self._changed.notify_all()


@contextmanager
def _checking_deadline(model: Model) -> Iterator[None]:
    """Check the deadline before every pass of a model, and before each of its blocks."""

    def check(_module: Any, _inputs: Any) -> None:
        require_time()

    modules = {model.module}  # a set: a block may be the whole model, or used twice
    for name in model.anatomy.blocks:
        modules.add(model.module.get_submodule(name))
    handles = [module.register_forward_pre_hook(check) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""The models of the page, each with a queue: a changed model (intervene) must not answer another visitor."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from vitlens.deadline import deadline, require_time
from vitlens.demo.limits import RUNNING, WAITING
from vitlens.errors import RunError, UnknownNameError
from vitlens.models.model import Model


class BusyError(RunError):
    """Other visitors kept a model for longer than a request waits."""


class OutdatedError(RunError):
    """A request that a newer one of the same visitor has replaced while it waited: nothing is shown of it."""


class _Queue:
    """The requests for one model, served in the order in which they came; the first of them has the model."""

    def __init__(self) -> None:
        self._requests: deque[object] = deque()
        self._changed = Condition()

    @contextmanager
    def place(self, alias: str, seconds: float) -> Iterator[None]:
        """Inside, the model belongs to this request. Raises BusyError where its turn does not come in this time."""
        request = object()
        with self._changed:
            self._requests.append(request)
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._requests[0] is request, seconds):
                    raise BusyError(
                        f"expected {alias} to be free within {seconds:.0f} s, found it busy with other visitors; "
                        "try again"
                    )
            yield
        finally:
            with self._changed:
                self._requests.remove(request)
                self._changed.notify_all()


@dataclass(frozen=True)
class Pool:
    """Models by alias; a model answers one request at a time. waiting: seconds that a request waits for its turn;
    running: seconds for which it may compute then."""

    models: tuple[Model, ...]
    waiting: float = WAITING
    running: float = RUNNING
    _queues: dict[str, _Queue] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._queues.update({model.alias: _Queue() for model in self.models})

    @property
    def aliases(self) -> tuple[str, ...]:
        """The models' names on the page."""
        return tuple(model.alias for model in self.models)

    def model(self, alias: str) -> Model:
        """The model of this alias. Raises UnknownNameError."""
        for model in self.models:
            if model.alias == alias:
                return model
        raise UnknownNameError("model on this page", str(alias), self.aliases)

    @contextmanager
    def turn(self, *aliases: str, wanted: Callable[[], bool] = lambda: True) -> Iterator[tuple[Model, ...]]:
        """Inside, these models belong to this request alone; in the order of `aliases`. wanted: whether the answer is.

        They are taken in one order whoever asks, so that two requests never wait for each other. Raises BusyError after
        `waiting` seconds, OutdatedError where the answer is no longer wanted then, and inside, at a pass of one of the
        models, TooLongError after `running` seconds.
        """
        models = tuple(self.model(alias) for alias in aliases)
        with ExitStack() as stack:
            for alias in sorted(set(aliases)):
                stack.enter_context(self._queues[alias].place(alias, self.waiting))
            if not wanted():
                raise OutdatedError("expected the newest request of its tab, found an earlier one")
            stack.enter_context(deadline(self.running))
            for model in dict.fromkeys(models):
                stack.enter_context(_watched(model))
            yield models


@contextmanager
def _watched(model: Model) -> Iterator[None]:
    """Inside, every pass of a model, and every block of it, first checks the deadline."""

    def check(_module: Any, _inputs: Any) -> None:
        require_time()

    modules = {model.module, *(model.module.get_submodule(name) for name in model.anatomy.blocks)}
    handles = [module.register_forward_pre_hook(check) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def pool_of(models: Sequence[Model]) -> Pool:
    """A pool of these models, of which each must have a classifier. Raises UnsupportedError."""
    for model in models:
        model.require_classifier()
    return Pool(tuple(models))

"""The models of the page, each with a queue: a changed model (intervene) must not answer another visitor."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock

from vitlens.demo.limits import WAITING
from vitlens.errors import RunError, UnknownNameError
from vitlens.models.model import Model


class BusyError(RunError):
    """Other visitors kept a model for longer than a request waits."""


@dataclass(frozen=True)
class Pool:
    """Models by alias; a model answers one request at a time. waiting: seconds that a request waits for its turn."""

    models: tuple[Model, ...]
    waiting: float = WAITING
    _locks: dict[str, Lock] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._locks.update({model.alias: Lock() for model in self.models})

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
    def turn(self, *aliases: str) -> Iterator[tuple[Model, ...]]:
        """Inside, these models belong to this request alone; in the order of `aliases`.

        They are taken in one order whoever asks, so that two requests never wait for each other. Raises BusyError after
        `waiting` seconds.
        """
        models = tuple(self.model(alias) for alias in aliases)
        with ExitStack() as stack:
            for alias in sorted(set(aliases)):
                self._take(alias)
                stack.callback(self._locks[alias].release)
            yield models

    def _take(self, alias: str) -> None:
        if not self._locks[alias].acquire(timeout=self.waiting):
            raise BusyError(
                f"expected {alias} to be free within {self.waiting:.0f} s, found it busy with other visitors; try again"
            )


def pool_of(models: Sequence[Model]) -> Pool:
    """A pool of these models, of which each must have a classifier. Raises UnsupportedError."""
    for model in models:
        model.require_classifier()
    return Pool(tuple(models))

"""What all tabs share, and how a tab is put together."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

from markupsafe import escape

from vitlens.commands.run.options import RunOptions
from vitlens.demo.badges import Badges
from vitlens.demo.limits import AT_ONCE
from vitlens.demo.pictures import Example, Picture
from vitlens.demo.pool import OutdatedError, Pool
from vitlens.display import for_terminal
from vitlens.errors import DataError, VitlensError, lacks_memory
from vitlens.models.model import Model

Component: TypeAlias = Any  # of gradio, which has no types for mypy here
Updates: TypeAlias = Mapping[Component, object]
Handler = TypeVar("Handler", bound=Callable[..., Any])
# the event of every handler that uses a model: each waits for its own model (see Pool); "multiple", as gradio's
# "always_last" sends the first one of several again in place of the last
EVENT: Final[Mapping[str, Any]] = {
    "api_visibility": "private",
    "concurrency_id": "models",
    "concurrency_limit": AT_ONCE,
    "show_progress": "minimal",
    "trigger_mode": "multiple",
}


@dataclass(frozen=True)
class DemoSite:
    """The models, examples and verdicts of a page; place: a folder for exports, one a session, deleted at the end."""

    pool: Pool
    examples: tuple[Example, ...]
    badges: Badges
    place: Path


class Newest:
    """Which of one visitor's requests for each tab is the newest: an earlier one that still waits is not answered.

    A picture or model that a tab is to show is replaced by a later one alone, never by a click in the tab as it was.
    """

    def __init__(self) -> None:
        self._pictures: dict[str, int] = {}
        self._clicks: dict[str, int] = {}

    def picture(self, tab: str) -> Callable[[], bool]:
        """A request to show another picture or model in a tab; the function says whether it is still the newest."""
        number = self._pictures[tab] = self._pictures.get(tab, 0) + 1
        return lambda: self._pictures[tab] == number

    def click(self, tab: str) -> Callable[[], bool]:
        """A request of a control of a tab; the function says whether it is still the newest."""
        picture = self._pictures.get(tab, 0)
        number = self._clicks[tab] = self._clicks.get(tab, 0) + 1
        return lambda: self._pictures.get(tab, 0) == picture and self._clicks[tab] == number


@dataclass(frozen=True)
class Asked:
    """A request for a tab. alias: of the model; wanted: whether its answer still is; session: of the visitor; data:
    what the browser sent with it."""

    picture: Picture
    alias: str
    wanted: Callable[[], bool]
    session: str = ""
    data: object = None


@dataclass(frozen=True)
class Here:
    """Where a tab is put together. tab: its name; and the components that say what is shown now: picture, a State of a
    Picture or None; alias, the chosen model; newest, a State of Newest; drawn, a State of what each tab shows, by its
    name: the picture's key and the model."""

    site: DemoSite
    picture: Component
    alias: Component
    newest: Component
    drawn: Component
    tab: str = ""

    @property
    def pool(self) -> Pool:
        """The models."""
        return self.site.pool

    def turn(self, now: Asked, *aliases: str) -> AbstractContextManager[tuple[Model, ...]]:
        """Inside, these models, or the chosen one, belong to a request."""
        return self.pool.turn(*(aliases or (now.alias,)), wanted=now.wanted)

    def on(
        self,
        listen: Callable[..., Any],
        handler: Callable[..., Updates],
        inputs: Sequence[Component],
        outputs: Sequence[Component],
        *,
        quiet: bool = False,
    ) -> None:
        """Answer an event of a control by a handler, which is given what is asked and the values of the inputs.

        quiet: without a sign of progress.
        """
        import gradio

        @told
        def answer(
            picture: Picture | None,
            alias: str,
            newest: Newest,
            request: gradio.Request,
            event: gradio.EventData,
            *values: Any,
        ) -> Updates:
            wanted = newest.click(self.tab)
            return handler(Asked(required(picture), alias, wanted, str(request.session_hash), event._data), *values)

        given = [self.picture, self.alias, self.newest, *inputs]
        listen(answer, given, list(outputs), **{**EVENT, **({"show_progress": "hidden"} if quiet else {})})


@dataclass(frozen=True)
class Export:
    """The report of what a tab shows. aliases: of the models that it needs; write: from them, the picture and the
    run's options to the path of the report."""

    aliases: tuple[str, ...]
    write: Callable[[tuple[Model, ...], Picture, RunOptions], Path | None]


@dataclass(frozen=True)
class TabParts:
    """One tab. name: as on the page; inputs: of which `refresh` is given the values after what is asked; outputs: what
    it may update; word: of the files of its report; export: its report, from the chosen model's alias and the value of
    `shows`."""

    name: str
    inputs: tuple[Component, ...]
    outputs: tuple[Component, ...]
    refresh: Callable[..., Updates]
    word: str = ""
    export: Callable[[str, Any], Export] | None = None
    shows: Component = None


def required(picture: Picture | None) -> Picture:
    """The picture. Raises DataError where none is chosen."""
    if picture is None:
        raise DataError(
            "expected a picture, found none (a session forgets it after a while); choose an example or upload one"
        )
    return picture


def typed(*words: str) -> str:
    """What to type for the report of a command."""
    return shlex.join(["vitlens", *words])


def words_of(error: BaseException) -> str:
    """The one line that a visitor reads of an error; no path of this machine is in an unexpected one."""
    if isinstance(error, VitlensError):
        return for_terminal(" ".join(str(error).split()))
    if lacks_memory(error) or type(error).__name__ == "OutOfMemoryError":
        return "expected more memory than there is; try a smaller model or picture"
    return f"unexpected {type(error).__name__}; the terminal of vitlens demo shows where"


def told(handler: Handler) -> Handler:
    """A handler of the page whose errors are shown as sentences; unexpected ones are printed in the terminal, too.

    A late answer, to a request that a newer one has replaced, changes nothing.
    """

    @wraps(handler)
    def telling(*args: Any, **kwargs: Any) -> Any:
        import gradio

        try:
            return handler(*args, **kwargs)
        except gradio.Error:
            raise
        except OutdatedError:
            return gradio.skip()
        except Exception as error:
            expected = isinstance(error, VitlensError) or lacks_memory(error)
            raise gradio.Error(str(escape(words_of(error))), duration=15, print_exception=not expected) from error

    return cast(Handler, telling)


def open_slider(low: float, high: float, **settings: Any) -> Component:
    """A slider that gives any number that is typed, NaN for anything else.

    gradio's own refuses one out of range before a handler runs, and so every handler that reads the slider. (A class
    of our own is no way: gradio writes a file beside its module.)
    """
    import gradio

    slider = gradio.Slider(low, high, **settings)
    slider.preprocess = lambda payload: float(payload) if isinstance(payload, int | float) else math.nan
    return slider

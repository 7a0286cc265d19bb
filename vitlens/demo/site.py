"""What all tabs share, and how a tab is put together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from vitlens.demo.badges import Badges
from vitlens.demo.limits import AT_ONCE
from vitlens.demo.pictures import Example, Picture
from vitlens.demo.pool import Pool
from vitlens.errors import DataError

Component: TypeAlias = Any  # of gradio, which has no types for mypy here
Updates: TypeAlias = Mapping[Component, object]


@dataclass(frozen=True)
class DemoSite:
    """The models, examples and verdicts of a page; place: a folder for exports, one a session, deleted at the end."""

    pool: Pool
    examples: tuple[Example, ...]
    badges: Badges
    place: Path

    @property
    def event(self) -> dict[str, Any]:
        """How every handler that uses a model is queued: each waits for its own model (see Pool).

        Every event is sent: gradio's "always_last" sends the first one of several again in place of the last.
        """
        return {
            "api_visibility": "private",
            "concurrency_id": "models",
            "concurrency_limit": AT_ONCE,
            "show_progress": "minimal",
            "trigger_mode": "multiple",
        }


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
    """A request for a tab. alias: of the model; wanted: whether its answer still is."""

    picture: Picture
    alias: str
    wanted: Callable[[], bool]


@dataclass(frozen=True)
class NowShown:
    """The components that say what is shown now. picture: a State of a Picture or None; alias: the chosen model;
    newest: a State of Newest; drawn: a State of what each tab shows, by its name: the picture's key and the model."""

    picture: Component
    alias: Component
    newest: Component
    drawn: Component

    @property
    def inputs(self) -> list[Component]:
        """What `asked` is made of."""
        return [self.picture, self.alias, self.newest]


@dataclass(frozen=True)
class TabParts:
    """One tab. inputs: of which `refresh` is given the values after what is asked; outputs: what it may update;
    controls: by which others may read it, by name."""

    name: str
    inputs: tuple[Component, ...]
    outputs: tuple[Component, ...]
    refresh: Callable[..., Updates]
    controls: Mapping[str, Component] = field(default_factory=dict)


NO_PICTURE: Final = (
    "expected a picture, found none (a session forgets it after a while); choose an example or upload one"
)


def required(picture: Picture | None) -> Picture:
    """The picture. Raises DataError where none is chosen."""
    if picture is None:
        raise DataError(NO_PICTURE)
    return picture


def asked(tab: str, picture: Picture | None, alias: str, newest: Newest) -> Asked:
    """A new request of a control of a tab. Raises DataError where no picture is chosen."""
    return Asked(required(picture), alias, newest.click(tab))

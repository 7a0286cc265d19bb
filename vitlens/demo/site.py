"""What all tabs share, and how a tab is put together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from vitlens.demo.badges import Badges
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
        """How every handler that uses a model is queued: as many at a time as there are models (see Pool)."""
        return {
            "api_visibility": "private",
            "concurrency_id": "models",
            "concurrency_limit": max(2, len(self.pool.models)),
            "show_progress": "minimal",
            "trigger_mode": "always_last",
        }


@dataclass(frozen=True)
class NowShown:
    """The components that say what is shown now. picture: a State of a Picture or None; alias: the chosen model."""

    picture: Component
    alias: Component


@dataclass(frozen=True)
class TabParts:
    """One tab. inputs: of which `refresh` is given the values after picture and alias; outputs: what it may update;
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

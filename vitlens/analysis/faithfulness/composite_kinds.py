"""The kinds of composite images, on which the place of a class is known without masks. One table, free of torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from vitlens.errors import UnknownNameError
from vitlens.references import resolved

CONFIDENT: Final = 0.5  # least probability of the label, for an image to be a part of a composite
FEWEST: Final = 4  # confidently classified images of distinct classes, without which there are no composites
COMPOSITES: Final = 25  # of each kind
_FOLDER: Final = "vitlens.analysis.faithfulness.composites"


@dataclass(frozen=True, kw_only=True)
class CompositeKind:
    """One kind of composite images.

    title: in reports; description: how they are made, in a sentence; function: "module:function" of (images, labels,
    masks) that makes them; arguments: further ones that it is always called with. classes: distinct classes in a
    composite; explained: the number of them that are explained in turn; needs_masks: whether the images' masks must be
    known; default: whether `--verify` makes them where masks are not known.
    """

    name: str
    title: str
    description: str
    function: str
    classes: int
    explained: int
    arguments: Mapping[str, object] = field(default_factory=dict)
    needs_masks: bool = False
    default: bool = False

    @property
    def make(self) -> Callable[..., Any]:
        """Its function."""
        return resolved(self.function)  # type: ignore[no-any-return]


_ENTRIES: Final = (
    CompositeKind(
        name="mosaic-2",
        title="2 x 2 mosaics",
        description="four images of distinct classes side by side, each class explained in turn (Böhle 2021)",
        function=f"{_FOLDER}:mosaics",
        arguments={"side": 2},
        classes=4,
        explained=4,
        default=True,
    ),
    CompositeKind(
        name="mosaic-3",
        title="3 x 3 mosaics",
        description="nine images of distinct classes side by side, each class explained in turn (Böhle 2021)",
        function=f"{_FOLDER}:mosaics",
        arguments={"side": 3},
        classes=9,
        explained=9,
    ),
    CompositeKind(
        name="embedded",
        title="embedded images",
        description="an image shrunk to half its sides, at a random place on an image of another class",
        function=f"{_FOLDER}:embedded",
        classes=2,
        explained=1,
        default=True,
    ),
    CompositeKind(
        name="pasted",
        title="pasted objects",
        description="the object of an image on the background of another class, whose own object is imputed",
        function=f"{_FOLDER}:pasted",
        classes=2,
        explained=1,
        needs_masks=True,
    ),
)

COMPOSITE_KINDS: Final[Mapping[str, CompositeKind]] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def composite_kind(name: str) -> CompositeKind:
    """The kind of this name. Raises UnknownNameError, which lists the known ones."""
    if name not in COMPOSITE_KINDS:
        raise UnknownNameError("kind of composites", name, COMPOSITE_KINDS)
    return COMPOSITE_KINDS[name]

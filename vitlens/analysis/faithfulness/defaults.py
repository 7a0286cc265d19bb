"""Defaults of the checks of attribution maps, and the kinds of composite images.

This module is free of torch and numpy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from vitlens.names import Substrate
from vitlens.references import resolved

# the baselines' names
RANDOM = "random"
CENTRE = "centre"
BASELINES: Final = (RANDOM, CENTRE)
SUBSTRATE: Final[Substrate] = "blur"  # what replaces a removed patch
# with which rankings are compared
OTHER_SUBSTRATES: Final[tuple[Substrate, ...]] = ("mean", "absent")
OTHER_IMAGES: Final = 128  # on which they are, at most
OTHER_STEPS: Final = 10  # of their removal curves
CONFIDENT: Final = 0.5  # least probability of the label, for an image to be a part of a composite
# confidently classified images of distinct classes, without which there are no composites
FEWEST: Final = 4
COMPOSITES: Final = 25  # of each kind


@dataclass(frozen=True, kw_only=True)
class CompositeKind:
    """One kind of composite images, on which the place of a class is known without masks.

    title: in reports.
    function: its name in localisation.py, of (images, labels, masks), always called with these
        arguments.
    classes: distinct classes in a composite.
    explained: the number of them that are explained in turn.
    needs_masks: whether the masks of the images must be known.
    default: whether `--verify` makes them without masks.
    """

    name: str
    title: str
    function: str
    classes: int
    explained: int
    arguments: Mapping[str, object] = field(default_factory=dict)
    needs_masks: bool = False
    default: bool = False

    @property
    def make(self) -> Callable[..., Any]:
        """Return the function with its arguments."""
        function = resolved(f"vitlens.analysis.faithfulness.localisation:{self.function}")
        return partial(function, **self.arguments)


_KINDS: Final = (
    CompositeKind(
        name="mosaic-2",
        title="2 x 2 mosaics",
        function="mosaics",
        arguments={"side": 2},
        classes=4,
        explained=4,
        default=True,
    ),
    CompositeKind(
        name="mosaic-3",
        title="3 x 3 mosaics",
        function="mosaics",
        arguments={"side": 3},
        classes=9,
        explained=9,
    ),
    CompositeKind(
        name="embedded",
        title="embedded images",
        function="embedded",
        classes=2,
        explained=1,
        default=True,
    ),
    CompositeKind(
        name="pasted",
        title="pasted objects",
        function="pasted",
        classes=2,
        explained=1,
        needs_masks=True,
    ),
)
COMPOSITE_KINDS: Final[Mapping[str, CompositeKind]] = {kind.name: kind for kind in _KINDS}

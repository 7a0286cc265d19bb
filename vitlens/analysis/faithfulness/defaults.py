"""Defaults of the checks of attribution maps, and the kinds of composite images.

This module is free of torch and numpy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from vitlens.names import Substrate
from vitlens.references import resolved

# the names of the baselines
RANDOM = "random"
CENTRE = "centre"
BASELINES: Final = (RANDOM, CENTRE)
SUBSTRATE: Final[Substrate] = "blur"  # replaces a removed patch
# the ranking of methods with SUBSTRATE is compared with those with other substrates
OTHER_SUBSTRATES: Final[tuple[Substrate, ...]] = ("mean", "absent")
OTHER_IMAGES: Final = 128  # most images of this comparison
OTHER_STEPS: Final = 10  # steps of its removal curves
CONFIDENT: Final = 0.5  # least probability of the label, for an image to be a part of a composite
FEWEST: Final = 4  # confidently classified images of distinct classes that composites need
COMPOSITES: Final = 25  # most composites of each kind


@dataclass(frozen=True, kw_only=True)
class CompositeKind:
    """One kind of composite images, on which the place of a class is known without masks.

    name: the name in COMPOSITE_KINDS.
    title: the name in reports.
    function: the name of a function in localisation.py, from images, labels and masks.
    arguments: further arguments of every call of this function.
    classes: the number of distinct classes in a composite.
    explained: the number of these that are explained in turn.
    needs_masks: True if the masks of the images must be known.
    default: True if `--verify` makes composites of this kind without masks.
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

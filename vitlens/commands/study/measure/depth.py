"""How deep a study goes: the methods, attacks and numbers of images of its chapters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.models.model import Model
from vitlens.models.support import meets

PROFILED: Final = 32  # batch size
_STUDIED: Final = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.studied)
_QUICK: Final = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.studied or not entry.slow)


@dataclass(frozen=True)
class Depth:
    """Numbers of images unless said otherwise.

    explained: methods whose maps are checked; ablated: on which every unit is ablated; checked: on which maps are;
    compared: whose maps are compared; disturbed: filtered, shuffled and occluded; panels: shown side by side;
    developed: whose attention is shown over all layers; featured: whose features are read; bank: training images of
    their classifiers; attacks: by name, on attacked images, some at one epsilon alone (singles, 1/255); searched: on
    which C&W searches for the smallest perturbation (0: it is left out), with so many steps in each of its searches;
    thorough: whether maps and attacks are checked in every way, and speed is measured at every batch size.
    """

    explained: tuple[str, ...] = _STUDIED
    ablated: int = 200
    checked: int = 30
    compared: int = 40
    disturbed: int = 200
    panels: int = 24
    developed: int = 24
    featured: int = 1000
    bank: int = 2500
    attacks: tuple[str, ...] = ("fgsm", "pgd", "low-frequency")
    singles: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({"low-frequency": 8.0}))
    attacked: int = 50
    searched: int = 0
    search_steps: int = 100
    thorough: bool = False


USUAL: Final = Depth()
FULL: Final = Depth(  # --full
    explained=_QUICK,
    ablated=10_000,
    checked=200,
    compared=500,
    disturbed=500,
    panels=50,
    featured=10_000,
    bank=50_000,
    attacks=("fgsm", "pgd", "low-frequency", "auto"),
    singles=MappingProxyType({}),
    attacked=500,
    searched=100,
    thorough=True,
)


def supported_methods(model: Model, methods: tuple[str, ...]) -> tuple[str, ...]:
    """The methods of these that a model supports."""
    entries = [ATTRIBUTIONS[name] for name in methods]
    return tuple(
        entry.name
        for entry in entries
        if model.anatomy.family in entry.families and (entry.needs is None or meets(model, entry.needs))
    )

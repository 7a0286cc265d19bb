"""How deep a study goes: the methods, attacks and numbers of images of its chapters."""

from dataclasses import dataclass
from typing import Final

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.models.model import Model
from vitlens.models.support import meets

PROFILED: Final = (1, 8, 32)  # batch sizes
_STUDIED: Final = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.studied)
_QUICK: Final = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.studied or not entry.slow)


@dataclass(frozen=True)
class Depth:
    """Numbers of images unless said otherwise.

    explained: methods whose maps are checked; checked: images on which they are; compared: whose maps are compared;
    panels: shown side by side; developed: whose attention is shown over all layers; featured: whose features are read;
    bank: training images of their classifiers; attacks: by name, on attacked images; searched: on which C&W searches
    for the smallest perturbation, with so many steps in each of its searches.
    """

    explained: tuple[str, ...] = _STUDIED
    checked: int = 50
    compared: int = 100
    panels: int = 50
    developed: int = 24
    featured: int = 1000
    bank: int = 5000
    attacks: tuple[str, ...] = ("fgsm", "pgd", "low-frequency")
    attacked: int = 100
    searched: int = 8
    search_steps: int = 40


USUAL: Final = Depth()
FULL: Final = Depth(  # --full
    explained=_QUICK,
    checked=200,
    compared=500,
    featured=10_000,
    bank=50_000,
    attacks=("fgsm", "pgd", "low-frequency", "auto"),
    attacked=500,
    searched=100,
    search_steps=100,
)


def supported_methods(model: Model, methods: tuple[str, ...]) -> tuple[str, ...]:
    """The methods of these that a model supports."""
    entries = [ATTRIBUTIONS[name] for name in methods]
    return tuple(
        entry.name
        for entry in entries
        if model.anatomy.family in entry.families and (entry.needs is None or meets(model, entry.needs))
    )

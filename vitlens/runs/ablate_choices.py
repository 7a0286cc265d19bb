"""What `vitlens ablate` can be asked for; free of torch, so that the command line can name it at once."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.names import UNIT_KINDS, Replacement, UnitKind


@dataclass(frozen=True)
class AblateChoices:
    """What stands in a head's place, and what is looked at.

    replace: replacements, the first of which the figures show (none: the mean, or on few images another one, and
    because says why); predicted: the model's predictions are taken for labels; units: what is removed; curves: heads
    removed one after another; greedy: also ranked again after each removal; pairs: the most important heads that are
    removed two by two (0: none), and the similarity of all heads' outputs; top: find that many most important heads
    alone, by sequential elimination; patch: also patch a clean run into a corrupted one, and attribute logits; clean,
    corrupted: the images of that (None: two of the data of different classes); prune: the share of heads to cut; save:
    where the pruned
    model is written.
    """

    replace: tuple[Replacement, ...] = ()
    because: str = ""
    predicted: bool = False
    units: tuple[UnitKind, ...] = UNIT_KINDS
    curves: bool = True
    greedy: bool = False
    pairs: int = 5
    top: int | None = None
    patch: bool = True
    clean: Path | None = None
    corrupted: Path | None = None
    prune: float | None = None
    save: Path | None = None

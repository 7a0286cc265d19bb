"""The verdict on one method, a sentence that follows from its checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from vitlens.analysis.answers.paired import intervals
from vitlens.analysis.faithfulness.league import BASELINES, MethodChecks
from vitlens.analysis.faithfulness.localisation import has_edge
from vitlens.commands.shared.maps.on_object import OnObjectRow
from vitlens.data.split import Split
from vitlens.uncertainty import Side


@dataclass(frozen=True)
class Evidence:
    """The results of a method's checks on which its verdict depends.

    usable: images whose map is finite and not constant; randomised: whether the randomisation check
    was run on it, flagged: by that check; faithful: the baselines that it is shown to beat (the paired 95 % interval
    excludes 0) in the score that judges; on_object: its ROC-AUC beside the best map that ignores the image, where
    masks are known.
    """

    usable: int
    images: int
    randomised: bool
    flagged: bool
    faithful: Sequence[str]
    on_object: OnObjectRow | None


def evidence(
    checks: MethodChecks, by_name: Mapping[str, MethodChecks], groups: Tensor | None, on_object: OnObjectRow | None
) -> Evidence:
    """The evidence on a method; by_name: the checks of all methods, including the baselines; groups (n,): of images."""
    return Evidence(
        usable=int(checks.faults.sound.sum()),
        images=len(checks.maps),
        randomised=checks.randomisation is not None,
        flagged=checks.randomisation is not None and checks.randomisation.flagged,
        faithful=[base for base in BASELINES if _is_greater(checks.judged, by_name[base].judged, groups)],
        on_object=on_object,
    )


def verdict(evidence: Evidence) -> str:
    """One sentence: faults of the maps come first, then the randomisation check, then the other checks."""
    unusable = evidence.images - evidence.usable
    if unusable == evidence.images:
        return "not usable: every map is constant or not finite"
    text = _beaten_baselines(evidence)
    if evidence.flagged:
        text = f"flagged: its maps hardly change when the weights are randomised; {text}"
    if not evidence.randomised:
        text = f"{text}; the randomisation check was not run, as maps are not finite"
    return f"{text}; {unusable} of {evidence.images} maps are not usable" if unusable else text


def masked_groups(split: Split) -> Tensor | None:
    """The groups of the images whose mask can be scored; None where images have no groups or no masks."""
    if split.groups is None or split.masks is None:
        return None
    return split.groups[has_edge(split.masks).cpu()]


def _beaten_baselines(evidence: Evidence) -> str:
    missing = [base for base in BASELINES if base not in evidence.faithful]
    if missing:
        return f"not shown to be more faithful than {' or '.join(missing)}"
    row = evidence.on_object
    if row is None:
        return "more faithful than random and centre"
    if row.side is not Side.ABOVE:
        return f"more faithful than random and centre, but not shown to localise the object better than {row.baseline}"
    return f"more faithful than random and centre, and localises the object better than {row.baseline}"


def _is_greater(first: Tensor, second: Tensor, groups: Tensor | None) -> bool:
    """Whether the paired interval of first minus second lies above 0."""
    low, _ = intervals((first - second).unsqueeze(0), groups=groups)
    return float(low[0]) > 0

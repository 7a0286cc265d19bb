"""One method's line in the league: what it reached, and what the checks say of it in a sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vitlens.analysis.answers.paired import intervals
from vitlens.analysis.faithfulness.league import BASELINES, MethodChecks
from vitlens.analysis.faithfulness.localisation import has_edge
from vitlens.data.split import Split
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class Evidence:
    """What is known of a method.

    says_something: of how many of the images its map can be ranked; randomised: whether it was put to the randomisation
    check, flagged: by it; faithful, localised: the baselines it is shown to beat (the paired 95 % interval excludes 0)
    in insertion minus deletion and, where masks are known, in ROC-AUC.
    """

    says_something: int
    images: int
    randomised: bool
    flagged: bool
    faithful: Sequence[str]
    localised: Sequence[str]
    has_masks: bool


def verdict(evidence: Evidence) -> str:
    """One plain sentence; a fault of the maps comes first, then the randomisation check, then what was reached."""
    silent = evidence.images - evidence.says_something
    if silent == evidence.images:
        return "says nothing: every map is constant or not finite"
    reached = _reached(evidence)
    if evidence.flagged:
        reached = f"flagged: its maps hardly change when the weights are randomised; {reached}"
    if not evidence.randomised:
        reached = f"{reached}; not put to the randomisation check, as maps are not finite"
    return f"{reached}; {silent} of {evidence.images} maps say nothing" if silent else reached


def _reached(evidence: Evidence) -> str:
    beaten, on_object = (_all_of(names) for names in (evidence.faithful, evidence.localised))
    if beaten != len(BASELINES):
        missing = " or ".join(base for base in BASELINES if base not in evidence.faithful)
        return f"not shown to be more faithful than {missing}"
    if not evidence.has_masks:
        return "more faithful than random and centre"
    if on_object != len(BASELINES):
        missing = " or ".join(base for base in BASELINES if base not in evidence.localised)
        return f"more faithful than random and centre, but not shown to lie on the object better than {missing}"
    return "more faithful than random and centre, and lies on the object better than both"


def _all_of(names: Sequence[str]) -> int:
    return sum(base in names for base in BASELINES)


def league_row(
    mark: MethodChecks, marks: Sequence[MethodChecks], estimates: Mapping[str, Mapping[str, Estimate]], split: Split
) -> dict[str, object]:
    """A method's line in the league: its means, whether it is flagged, and the verdict in words."""
    own = estimates[mark.name]
    row: dict[str, object] = {"method": mark.name, "baseline": mark.name in BASELINES}
    row |= {name.split("/")[-1]: round(estimate.value, 6) for name, estimate in own.items() if "cost" not in name}
    if mark.randomisation is not None:
        stages = mark.randomisation.correlation.nanmean(1).tolist()
        row["by_stage"] = {
            name: None if np.isnan(value) else round(value, 4) for name, value in zip(mark.randomisation.stages, stages)
        }
    row |= {"seconds": mark.seconds, "forwards": mark.forwards, "faults": mark.faults.words}
    if mark.name in BASELINES:
        return row | {"flagged": False, "verdict": "knows nothing of the model"}
    by_name = {each.name: each for each in marks}
    beside = {
        base: {
            "faithfulness": _difference(mark.fidelity.gaps, by_name[base].fidelity.gaps, split.groups),
            **_localised(mark, by_name[base], split),
        }
        for base in BASELINES
    }
    flagged = mark.randomisation is not None and mark.randomisation.flagged
    evidence = Evidence(
        says_something=int(mark.faults.sound.sum()),
        images=len(mark.maps),
        randomised=mark.randomisation is not None,
        flagged=flagged,
        faithful=[base for base in BASELINES if beside[base]["faithfulness"] > 0],
        localised=[base for base in BASELINES if beside[base].get("roc_auc", -1.0) > 0],
        has_masks=bool(mark.scores),
    )
    return row | {"flagged": flagged, "verdict": verdict(evidence)}


def _localised(mark: MethodChecks, other: MethodChecks, split: Split) -> dict[str, float]:
    if not mark.scores:
        return {}
    return {"roc_auc": _difference(mark.scores["roc_auc"], other.scores["roc_auc"], masked_groups(split))}


def _difference(first: Tensor, second: Tensor, groups: Tensor | None) -> float:
    """The low end of the paired interval of first minus second: above 0, the first is shown to be greater."""
    low, _ = intervals((first - second).unsqueeze(0), groups=groups)
    return float(low[0])


def masked_groups(split: Split) -> Tensor | None:
    """What the images share, of those whose mask can be scored; None where nothing is shared or masked."""
    if split.groups is None or split.masks is None:
        return None
    return split.groups[has_edge(split.masks).cpu()]

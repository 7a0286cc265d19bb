"""What `vitlens attack` writes down: metrics, tables and arrays, from which figures and words are made."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Final

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.robustness.checks import Check
from vitlens.analysis.robustness.curve import Outcome, paired, robust_by_class
from vitlens.analysis.robustness.transfer import Transfer
from vitlens.attacks.registry import ATTACKS, Attack
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.runs.attack_choices import UNIT, AttackChoices
from vitlens.runs.attack_sample import Sample
from vitlens.runs.attack_sweep import Swept, Work
from vitlens.uncertainty import Estimate

Row = dict[str, object]

AXES: Final[Mapping[str, str]] = {
    "linf": "epsilon (1/255)", "l2": "L2 distance (pixel units)", "patch": "share of the pixels covered"
}  # fmt: skip


def scale_of(norm: str) -> float:
    """What an epsilon in pixel units is multiplied by where a person reads it: L∞ in 1/255."""
    return UNIT if norm == "linf" else 1.0


def typed(epsilon: float, norm: str) -> str:
    """An epsilon as it is typed, and as metrics are named: "4", "0.5"."""
    return f"{round(epsilon * scale_of(norm), 6):g}"


def titled(known: Attack) -> str:
    """An attack with its norm, in a few words: "PGD L∞", "C&W L2"."""
    norm = {"linf": " L∞", "l2": " L2"}.get(known.norm, "")
    return known.title.partition(" (")[0] + norm


def steps_of(known: Attack, choices: AttackChoices) -> int:
    """How many steps an attack takes; 1 where it has one alone."""
    return (choices.steps_for(known.name) or known.steps) if known.steps else 1


def keep_curves(folder: RunFolder, works: Sequence[Work], found: Sequence[Sequence[Swept]]) -> None:
    """Clean and robust accuracies, median distances, what each attack cost; arrays of every image."""
    curves: list[Row] = []
    costs: list[Row] = []
    for work, all_swept in zip(works, found):
        middle = _middle(work, works)
        clean = accuracy(all_swept[0].outcome.clean, groups=work.split.groups, seed=work.options.seed)
        folder.metric(f"accuracy{middle}", clean)
        for swept in all_swept:
            known, outcome = ATTACKS[swept.attack], swept.outcome
            for epsilon, estimate in zip((0.0, *outcome.epsilons), _estimates(outcome, clean, work.options.seed)):
                folder.metric(f"robust_accuracy{middle}/{outcome.name}/{typed(epsilon, known.norm)}", estimate)
                curves.append(_curve_row(work, swept, known, epsilon, estimate))
            costs.append(_cost_row(folder, work, swept, known, middle))
        _keep_arrays(folder, work, all_swept)
    folder.table("curves", curves)
    folder.table("attacks", costs)


def _middle(work: Work, works: Sequence[Work]) -> str:
    return f"/{work.model.alias}" if len(works) > 1 else ""


def _estimates(outcome: Outcome, clean: Estimate, seed: int) -> Iterator[Estimate]:
    yield clean
    yield from outcome.accuracies(seed=seed)


def _curve_row(work: Work, swept: Swept, known: Attack, epsilon: float, estimate: Estimate) -> Row:
    return {
        "model": work.model.alias, "attack": swept.outcome.name, "title": titled(known), "norm": known.norm,
        "epsilon": float(typed(epsilon, known.norm)), "accuracy": estimate.value, "low": estimate.low,
        "high": estimate.high, "n": estimate.n,
    }  # fmt: skip


def _cost_row(folder: RunFolder, work: Work, swept: Swept, known: Attack, middle: str) -> Row:
    outcome = swept.outcome
    median = outcome.median_distance(unit=1 / scale_of(known.norm))
    if median is not None:
        folder.metric(f"median_distance{middle}/{outcome.name}", median)
    right = int(outcome.clean.sum())
    survived = int(outcome.robust(outcome.epsilons[-1]).sum())
    broken = int((outcome.clean & outcome.broken_at.isfinite()).sum())
    return {
        "model": work.model.alias, "attack": outcome.name, "name": swept.attack, "title": titled(known),
        "norm": known.norm, "kind": known.kind, "source": known.paper, "gradients": known.gradients,
        "steps": steps_of(known, work.choices), "restarts": work.choices.restarts if known.random_start else 1,
        "right": right, "survived": survived, "broken": broken, "median": None if median is None else median.value,
        "forwards": swept.forwards, "backwards": swept.backwards, "seconds": round(swept.seconds, 3),
    }  # fmt: skip


def _keep_arrays(folder: RunFolder, work: Work, all_swept: Sequence[Swept]) -> None:
    arrays = {f"broken_at_{swept.outcome.name}": swept.outcome.broken_at.numpy() for swept in all_swept}
    arrays |= {f"distance_{swept.outcome.name}": swept.distance.numpy() for swept in all_swept}
    folder.arrays(
        f"attack-{work.model.alias}", clean=all_swept[0].outcome.clean.numpy(), label=work.labels.numpy(), **arrays
    )


def keep_pairs(folder: RunFolder, found: Sequence[Sequence[Swept]], *, seed: int) -> None:
    """The models tested against each other under every attack at every epsilon, all corrected together."""
    matched = [
        (one.outcome, two.outcome)
        for first, second in combinations(found, 2)
        for one, two in zip(first, second)
    ]  # fmt: skip
    known = {swept.outcome.name: ATTACKS[swept.attack] for swept in found[0]}
    rows: list[Row] = []
    for test in paired(matched, seed=seed) if matched else ():
        attack = known.get(test.name)
        norm, title = ("linf", "none") if attack is None else (attack.norm, titled(attack))
        epsilon = typed(test.epsilon, norm)
        if test.name != "clean":
            folder.metric(f"robust_difference/{test.first}/{test.second}/{test.name}/{epsilon}", test.difference)
        rows.append(
            {
                "attack": test.name, "title": title, "norm": norm, "epsilon": float(epsilon), "first": test.first,
                "second": test.second, "only_first": test.only_first, "only_second": test.only_second,
                "difference": test.difference.value, "low": test.difference.low, "high": test.difference.high,
                "p": test.p, "p_holm": test.p_holm,
            }
        )  # fmt: skip
    folder.table("pairs", rows)


def keep_classes(folder: RunFolder, works: Sequence[Work], sample: Sample, found: Sequence[Sequence[Swept]]) -> None:
    """Clean and robust accuracy of every class at the sample's epsilon; nothing where images have no labels."""
    rows: list[Row] = []
    norm = ATTACKS[sample.attack].norm
    for work, all_swept in zip(works, found):
        (swept,) = (one for one in all_swept if one.attack == sample.attack)
        if work.choices.predicted or work.split.labels is None:
            continue
        labels = work.split.labels.cpu().long()
        scores = [
            robust_by_class(
                swept.outcome, labels, work.split.classes, epsilon=epsilon, seed=work.options.seed
            )
            for epsilon in (0.0, sample.epsilon)
        ]  # fmt: skip
        for clean, robust in zip(*scores):
            if clean.accuracy is not None and robust.accuracy is not None:
                ends = {
                    f"{name}_{key}": value
                    for name, one in (("clean", clean.accuracy), ("robust", robust.accuracy))
                    for key, value in (("accuracy", one.value), ("low", one.low), ("high", one.high))
                }
                rows.append(
                    {
                        "model": work.model.alias, "class": clean.name, "n": clean.n, "attack": swept.outcome.name,
                        "epsilon": float(typed(sample.epsilon, norm)), **ends,
                    }
                )  # fmt: skip
    folder.table("by_class", rows)


def keep_sample(folder: RunFolder, sample: Sample, works: Sequence[Work]) -> None:
    """What was attacked once more: which attack, at which epsilon, how many of how many images."""
    known = ATTACKS[sample.attack]
    folder.table("sample", [
        {
            "model": work.model.alias, "attack": known.slug, "title": titled(known), "norm": known.norm,
            "epsilon": float(typed(sample.epsilon, known.norm)), "n": len(sample.indices), "fooled": int(fooled.sum()),
        }
        for work, fooled in zip(works, sample.fooled)
    ])  # fmt: skip


def keep_transfer(folder: RunFolder, matrix: Transfer, *, seed: int) -> None:
    """Who fools whom: rates and accuracies of every source on every target."""
    rows: list[Row] = []
    for source, made_for in enumerate(matrix.aliases):
        for target, shown_to in enumerate(matrix.aliases):
            rate, right = matrix.rate(source, target, seed=seed), matrix.accuracy(source, target, seed=seed)
            if rate is not None:
                folder.metric(f"transfer_rate/{made_for}/{shown_to}", rate)
            folder.metric(f"transfer_accuracy/{made_for}/{shown_to}", right)
            clean = matrix.clean_accuracy(target, seed=seed)
            ends: Row = {} if rate is None else {"low": rate.low, "high": rate.high, "n": rate.n}
            rows.append(
                {
                    "made_for": made_for, "shown_to": shown_to, "rate": None if rate is None else rate.value, **ends,
                    "accuracy": right.value, "clean": clean.value,
                }
            )  # fmt: skip
    folder.table("transfer", rows)


def keep_checks(folder: RunFolder, works: Sequence[Work], checks: Sequence[Sequence[Check]]) -> None:
    """Every check of every model."""
    folder.table("checks", [
        {"model": work.model.alias, **asdict(check)} for work, some in zip(works, checks) for check in some
    ])  # fmt: skip

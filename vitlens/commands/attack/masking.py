"""Signs of masked gradients and of too weak attacks among the self-checks and transfers of one model."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.analysis.robustness.verdict import CheckState
from vitlens.commands.attack.epsilons import epsilon_words
from vitlens.commands.attack.record import CHECKS, CURVES, SAMPLE, TRANSFER
from vitlens.commands.attack.record.rows import AttackCheckRow, AttackCurveRow
from vitlens.records import Record
from vitlens.report.document import Finding
from vitlens.report.findings import finding
from vitlens.report.numbers import percent
from vitlens.uncertainty import wilson

_FAULTS: Final = {
    "gradients": "the gradient of the loss is zero everywhere for {against} of {of} correctly classified images",
    "gradients read": "the gradients that {attack} read are zero everywhere for {against} of {of} correctly classified "
    "images",
    "no limit": "{attack} leaves {against} of {of} correctly classified images correct without any limit on the "
    "perturbation",
}


def masked(record: Record, alias: str) -> Iterator[Finding | None]:
    """The strongest sign that the attacks on one model fail because of its gradients, if there is one."""
    curves = [row for row in record.rows(CURVES) if row.model == alias]
    failed = [
        row for row in record.rows(CHECKS) if row.model == alias and row.check.state is CheckState.FAILED and row.share
    ]
    signs = [(row, _finding(alias, row, curves)) for row in failed]
    found = [(row, each) for row, each in signs if each is not None]
    if found:
        yield max(found, key=lambda pair: pair[1].rank)[1]
    yield _beaten_by_transfer(record, alias)


def fault_of(row: AttackCheckRow, curves: Sequence[AttackCurveRow]) -> str:
    """A failed self-check in words."""
    titles = {curve.attack: curve.title for curve in curves}
    names = [titles.get(name, name) for name in row.attack.split(", ")]
    if len(names) == 2:
        weaker, stronger = names
        if row.against is None:
            return f"{weaker} fools images that {stronger} does not"
        return (
            f"{weaker} fools {row.against} images that {stronger}, the stronger attack, does not, of {row.of} on which "
            "the two differ"
        )
    if row.name in _FAULTS and row.against is not None:
        return _FAULTS[row.name].format(against=row.against, of=row.of, attack=names[0])
    return f"{row.name}, {names[0]}: {row.found}"


def _finding(alias: str, row: AttackCheckRow, curves: Sequence[AttackCurveRow]) -> Finding | None:
    """A failed self-check as a finding, with the share of the images that contradict it."""
    if row.share is None:
        return None
    compared = ", " in row.attack
    cause = "The gradients of" if compared or row.name in ("gradients", "gradients read", "no limit") else "Attacks on"
    fault = "are masked" if cause == "The gradients of" else "are too weak"
    claim = f"{cause} **{alias}** {fault}: {fault_of(row, curves)}. Its accuracy under attack is no sign of robustness."
    return finding(
        claim, row.share, kind="hidden fault", reference=0.5 if compared else 0.0, figure="curves", rows=(row,)
    )


def _beaten_by_transfer(record: Record, alias: str) -> Finding | None:
    """That adversarial images of another model fool this one more often than its own do."""
    rows = [row for row in record.rows(TRANSFER) if row.shown_to == alias]
    samples = [row for row in record.rows(SAMPLE) if row.model == alias]
    own = [row for row in rows if row.made_for == alias]
    others = [row for row in rows if row.made_for != alias]
    if not (own and others and samples):
        return None
    (white,), (sample,) = own, samples
    black = min(others, key=lambda row: row.accuracy)
    if black.accuracy >= white.accuracy:
        return None
    return finding(
        f"The gradients of **{alias}** are masked: adversarial images made for {black.made_for} "
        f"({sample.title} at {epsilon_words(sample.epsilon, sample.norm)}) lower its accuracy to "
        f"{percent(black.accuracy, 1)}, its own only to {percent(white.accuracy, 1)}.",
        wilson(round(white.accuracy * sample.n), sample.n),
        kind="hidden fault",
        reference=black.accuracy,
        figure="transfer",
        rows=(black, white, sample),
    )

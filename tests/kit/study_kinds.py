"""Kinds of studies of one factor: their variants, and results of papers next to their own."""

from dataclasses import replace
from typing import Any, Final

import pytest

from vitlens.commands.study.kinds.catalogue import KINDS
from vitlens.commands.study.kinds.findings import FINDINGS
from vitlens.commands.study.kinds.kinds import Finding
from vitlens.commands.study.kinds.record import ComparisonRow, FindingRow
from vitlens.commands.study.kinds.rows import finding_rows
from vitlens.uncertainty import Estimate

KINDS_WITH_FINDINGS: Final = tuple(FINDINGS)
MODULES: Final = ("setup", "measure", "report")  # modules that look a kind up in KINDS
TOO_HIGH: Final = 1e30  # a learning rate at which the loss is infinite after a step


def findings_of(kind: str) -> tuple[Finding, ...]:
    """Return the results of papers next to which a kind of study puts its own."""
    return FINDINGS[kind]


def compared_pairs(kind: str) -> list[set[str]]:
    """Return the labels of each two variants that a kind of study compares."""
    pairs = (*KINDS[kind].pairs, *KINDS[kind].steps)
    return [set(pair) for pair in pairs]


def with_exploding_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the study of recipes with its first variant and one whose loss becomes infinite."""
    base = KINDS["recipe"].variants[0]
    recipe: dict[str, Any] = {"learning_rate": TOO_HIGH}
    exploding = replace(base, label="exploding", words="exploding", recipe=recipe)
    kind = replace(KINDS["recipe"], variants=(base, exploding))
    for module in MODULES:
        monkeypatch.setattr(f"vitlens.commands.study.kinds.{module}.KINDS", {"recipe": kind})
    monkeypatch.setattr("vitlens.commands.study.kinds.measure.FINDINGS", {})


def finding_next_to(
    expects: Any, *, difference: float, p: float, detectable: float, reverse: bool = False
) -> FindingRow:
    """Return a reported result next to a difference of two variants in points.

    reverse: the paper names the two variants in the other order.
    """
    estimate = Estimate(difference, unit="points")
    row = ComparisonRow(
        family="difference",
        label="b",
        against="a",
        words="B",
        against_words="A",
        difference=estimate,
        p=p,
        p_holm=p,
        detectable=detectable,
    )
    label, against = ("a", "b") if reverse else ("b", "a")
    finding = Finding(label, against, expects, "B is better", "Nobody 2000", caveat="nothing")
    (result,) = finding_rows([finding], [row])
    return result

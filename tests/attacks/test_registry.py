"""The registry: one literal table, free of torch."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.attacks.models import setting
from tests.contracts.test_imports import runs_without
from vitlens.attacks.algorithm import Algorithm, algorithm_of
from vitlens.attacks.registry import ATTACKS, comparisons

DOCS = Path(__file__).parents[2] / "docs" / "attacks.md"
ALONE = [name for name, attack in ATTACKS.items() if not attack.members]


def test_it_is_one_literal_table_free_of_torch():
    runs_without("from vitlens.attacks.registry import ATTACKS, comparisons\nassert list(comparisons(ATTACKS))")
    assert len({entry.slug for entry in ATTACKS.values()}) == len(ATTACKS)
    assert [ATTACKS[name].slug for name in ("pgd", "pgd-l2", "cw")] == ["pgd-linf", "pgd-l2", "cw-l2"]
    for name, entry in ATTACKS.items():
        assert (name, bool(entry.function)) == (entry.name, not entry.members)
        assert {*entry.members, *entry.stronger_than} <= ATTACKS.keys() - {name}
    ranks = sorted(entry.examples for entry in ATTACKS.values() if entry.examples)
    assert ranks == list(range(1, len(ranks) + 1))


@pytest.mark.parametrize("name", ALONE)
def test_the_fields_are_those_of_the_algorithm(name):
    entry, made = ATTACKS[name], algorithm_of(ATTACKS[name], setting(6))
    assert isinstance(made, Algorithm)
    assert made.norm.name == entry.norm
    assert bool(made.objectives) == entry.gradients
    longer = algorithm_of(entry, replace(setting(6), steps=12))
    assert (longer.queries > made.queries) == bool(entry.steps)
    spent = made.queries * (1 if entry.name != "deepfool" else entry.passes_a_step)
    known = replace(entry, steps=min(6, entry.steps)).passes()
    assert abs(spent - (known if not entry.targets else known // entry.targets)) <= 9


def test_which_attacks_are_slow_checked_with_more_steps_and_stronger_than_which():
    assert {name for name, entry in ATTACKS.items() if entry.slow} == {"square", "auto"}
    assert sum(part.passes() for part in ATTACKS["auto"].parts) == 100 + 9 * 100 + 50 * 100
    longer = {name for name, entry in ATTACKS.items() if entry.takes_more_steps}
    assert longer == {"bim", "pgd", "pgd-l2", "pgd-dlr", "apgd-ce", "apgd-dlr", "cw", "deepfool"}
    single_step, score_based = "one step against many", "without gradients against with"
    strong = ("bim", "pgd", "apgd-ce", "apgd-dlr", "auto")
    assert list(comparisons(list(ATTACKS))) == [
        *((weak, name, single_step) for weak in ("fgsm", "noise") for name in strong),
        *(("square", name, score_based) for name in strong),
        ("pgd", "apgd-ce", "fixed step against adaptive"),
        ("pgd", "auto", "one attack against the worst case of three"),
    ]
    assert list(comparisons(["cw", "pgd-l2", "patch", "fgsm"])) == []


def test_the_table_of_the_docs_is_that_of_the_registry():
    rows = re.findall(r"^\| `([a-z][a-z0-9-]*)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", DOCS.read_text(), re.M)
    norms = {"linf": "L∞", "l2": "L2", "patch": "patch"}
    assert rows == [(name, norms[entry.norm], entry.description, entry.paper) for name, entry in ATTACKS.items()]

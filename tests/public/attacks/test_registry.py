"""The registry's entries, which costs, checks and docs are read from."""

import re
from pathlib import Path

from vitlens.attacks.registry import ATTACKS, comparisons

DOCS = Path(__file__).parents[3] / "docs" / "attacks.md"


def test_names_members_and_ranks_are_consistent():
    assert len({entry.slug for entry in ATTACKS.values()}) == len(ATTACKS)
    assert [ATTACKS[name].slug for name in ("pgd", "pgd-l2", "cw")] == ["pgd-linf", "pgd-l2", "cw-l2"]
    for name, entry in ATTACKS.items():
        assert (name, bool(entry.function)) == (entry.name, not entry.members)
        assert {*entry.members, *entry.stronger_than} <= ATTACKS.keys() - {name}
    ranks = sorted(entry.examples for entry in ATTACKS.values() if entry.examples)
    assert ranks == list(range(1, len(ranks) + 1))


def test_which_attacks_are_slow_checked_with_more_steps_and_stronger_than_which():
    assert {name for name, entry in ATTACKS.items() if entry.slow} == {"square", "auto"}
    assert [part.passes() for part in ATTACKS["auto"].parts] == [100, 9 * 100, 50 * 100]
    assert ATTACKS["pgd"].passes(restarts=3) == 60
    assert ATTACKS["fgsm"].passes(restarts=3) == 1
    assert ATTACKS["cw"].passes(restarts=3) == 900
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

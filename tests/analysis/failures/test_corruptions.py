"""The tables of corruptions and disturbances: free of torch, each entry with its operation."""

import pytest

from tests.contracts.test_imports import runs_without
from vitlens.analysis.failures.disturbances import CORRUPTIONS, DISTURBANCES, SEVERITIES
from vitlens.analysis.failures.operations import OPERATIONS


def test_listing_imports_nothing_heavy():
    runs_without(
        "from vitlens.analysis.failures.disturbances import CORRUPTIONS, DISTURBANCES\n"
        "assert [way.at((32, 32)) for way in DISTURBANCES.values()] and CORRUPTIONS"
    )


@pytest.mark.parametrize("entry", [*CORRUPTIONS.values(), *DISTURBANCES.values()], ids=lambda entry: entry.title)
def test_every_entry_names_an_operation(entry):
    assert entry.operation in OPERATIONS


def test_strengths_grow_or_fall_with_severity():
    for entry in CORRUPTIONS.values():
        assert len(entry.levels) == len(SEVERITIES)
        assert list(entry.levels) in (sorted(entry.levels), sorted(entry.levels, reverse=True))

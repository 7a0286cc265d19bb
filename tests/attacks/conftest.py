"""Fixtures of the tests of attacks."""

from collections.abc import Iterator

import pytest

from vitlens.attacks import scores


@pytest.fixture(scope="class")  # hypothesis does not accept function scope
def few_queries() -> Iterator[None]:
    """Square takes 50 queries per step; six are enough to test the contract of every attack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "QUERIES", 6)
        yield

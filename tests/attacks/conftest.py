"""What tests of attacks share."""

from collections.abc import Iterator

import pytest

from vitlens.attacks import scores


@pytest.fixture(scope="class")  # once a test; hypothesis asks for more than function scope
def few_queries() -> Iterator[None]:
    """Square asks 50 times a step; where only what every attack promises is tested, six are enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "QUERIES", 6)
        yield

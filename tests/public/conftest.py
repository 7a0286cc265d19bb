"""No figures: what a command measures is asked here, its figures are drawn by tests/golden,
contracts and kernels.
"""

from collections.abc import Iterator

import pytest

from tests.kit.saving import no_figures


@pytest.fixture(scope="package", autouse=True)
def undrawn() -> Iterator[None]:
    with no_figures():
        yield

"""No figures: tests/golden, contracts and kernels draw them."""

from collections.abc import Iterator

import pytest

from tests.kit.saving import no_figures


@pytest.fixture(scope="package", autouse=True)
def undrawn() -> Iterator[None]:
    with no_figures():
        yield

"""Parameters of which some are marked slow."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_among(values: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Return the values as parameters of a test, those in `slow` marked slow."""
    return [slow_if(value in slow, value) for value in values]


def slow_except(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the values as parameters of a test, those not in `quick` marked slow."""
    return [slow_if(value not in quick, value) for value in values]


def slow_if(is_slow: bool, *values: Any) -> Any:
    """Return the values as one parameter set of a test, marked slow if `is_slow`."""
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(*values, marks=marks)

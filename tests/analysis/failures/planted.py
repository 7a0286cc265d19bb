"""Moved to tests/kit; this name stays until no test uses it."""

from tests.kit.planted_failures import at_border, at_random, low_contrast, model, squares

__all__ = ["at_border", "at_random", "low_contrast", "model", "squares"]

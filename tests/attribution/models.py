"""Moved to tests/kit; this name stays until no test uses it."""

from tests.kit.explainable import cnn

__all__ = ["cnn"]

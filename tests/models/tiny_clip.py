"""Moved to tests/kit/models; here until all that import it have moved."""

from tests.kit.models.clip import registered, tiny  # noqa: F401

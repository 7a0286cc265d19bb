"""Moved to tests/kit/models; here until all that import it have moved."""

from tests.kit.models.handwritten import *  # noqa: F403

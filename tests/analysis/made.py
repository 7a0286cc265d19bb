"""Moved to tests/kit/made.py."""

from tests.kit.made import *  # noqa: F403 - until the last test that imports it from here has moved

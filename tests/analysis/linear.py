"""Moved to tests/kit/linear.py."""

from tests.kit.linear import *  # noqa: F403 - until the last test that imports it from here has moved

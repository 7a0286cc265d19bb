"""Moved to tests/kit/tiny.py."""

from tests.kit.tiny import *  # noqa: F403 - until the last test that imports it from here has moved

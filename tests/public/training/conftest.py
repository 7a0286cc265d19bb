"""Fixtures of trainings."""

from tests.kit.trainings import progress_every_step, still

__all__ = ["progress_every_step", "still"]

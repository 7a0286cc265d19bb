"""What tests that go through the public API make their models and images with, in one place for all of them."""

from vitlens.data.digits import CLASSES, digits
from vitlens.models.loading import untrained
from vitlens.models.saved import save

__all__ = ["CLASSES", "digits", "save", "untrained"]

"""vitlens: train or load a vision transformer, and turn it inside out."""

from vitlens.version import __version__

__all__ = ["__version__"]

"""The captions of images."""

from vitlens.data.captions import captions_of

__all__ = ["captions_of"]

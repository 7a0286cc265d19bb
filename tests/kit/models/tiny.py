"""Tiny models of every family: see tests/lens/tiny.py."""

from tests.lens.tiny import FAMILIES, images, model_of, our_swin, ours, shaken, timm_model, torchvision_swin

__all__ = ["FAMILIES", "images", "model_of", "our_swin", "ours", "shaken", "timm_model", "torchvision_swin"]

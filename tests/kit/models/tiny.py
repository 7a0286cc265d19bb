"""Tiny models of every family: see tests/kit/tiny.py."""

from tests.kit.tiny import FAMILIES, images, model_of, our_swin, ours, shaken, timm_model, torchvision_swin

__all__ = ["FAMILIES", "images", "model_of", "our_swin", "ours", "shaken", "timm_model", "torchvision_swin"]

"""Attributions: what each patch or pixel of an image says for a class; registry.py lists them."""

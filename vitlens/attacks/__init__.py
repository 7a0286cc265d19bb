"""Attacks: the smallest change of an image that a model gets wrong; registry.py lists them, sweep.py draws curves."""

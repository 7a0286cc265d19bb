"""Figures of `vitlens stats`."""

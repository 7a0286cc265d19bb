"""Figures of `vitlens ablate`."""

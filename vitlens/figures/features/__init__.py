"""Figures of `vitlens features`."""

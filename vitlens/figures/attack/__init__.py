"""Figures of `vitlens attack`."""

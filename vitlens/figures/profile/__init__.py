"""Figures of `vitlens profile`."""

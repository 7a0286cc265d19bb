"""Figures of windowed attention: windows, shift and mask, and the effective receptive field."""

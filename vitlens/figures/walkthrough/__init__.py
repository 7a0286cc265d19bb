"""Figures of one head, step by step: numbers in, Figure out."""

"""Failures by category with causal tests, of every command that has labelled images: rows, measuring, sections."""

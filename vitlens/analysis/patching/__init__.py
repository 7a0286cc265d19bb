"""Patching."""

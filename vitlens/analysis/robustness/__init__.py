"""Robust accuracy over epsilon, self-checks of attacks, transfer, and what an attack changes inside a model."""

"""Adapters of other libraries, one file each; registry.py names them."""

"""Adapters of other libraries, one file each (vitlens/attribution/libraries.py names them)."""

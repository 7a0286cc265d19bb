"""Attribution methods: maps of how each patch or pixel contributes to a class; registry.py lists
them.
"""

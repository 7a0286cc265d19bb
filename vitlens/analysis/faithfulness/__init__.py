"""Checks of attribution maps: deletion, ROAD, pointing game, randomisation, stability."""

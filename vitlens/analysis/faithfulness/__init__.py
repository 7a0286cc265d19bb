"""How faithful, localised and weight-dependent attribution maps are: deletion, ROAD, pointing game,
randomisation.
"""

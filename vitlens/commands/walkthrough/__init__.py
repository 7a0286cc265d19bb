"""`vitlens walkthrough`: one head of one layer, step by step, with the numbers of a model and an
image.
"""

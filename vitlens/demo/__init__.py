"""`vitlens demo`: a page on this machine that shows what a model does with a picture.

It contains no analysis.
"""

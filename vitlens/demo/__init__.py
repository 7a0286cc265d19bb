"""`vitlens demo`: a page on this machine that shows what a model does with a picture; no analysis
is in it.
"""

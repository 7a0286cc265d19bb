"""`vitlens study`: train, evaluate and analyse several models in one report; or a controlled
comparison over seeds.
"""

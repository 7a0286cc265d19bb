"""`vitlens study`: train, evaluate and look into several models in one report; or one question with several seeds."""

"""`vitlens models`: the models that can be loaded, and which commands each model supports."""

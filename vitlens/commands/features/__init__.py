"""`vitlens features`: what the features of models hold, layer by layer."""

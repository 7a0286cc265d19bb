"""`vitlens ablate`: what a model loses without each head, MLP and block, and what follows from it."""

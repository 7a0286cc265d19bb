"""`vitlens ablate`: ablation of every head, MLP and block of a model, and analyses based on it."""

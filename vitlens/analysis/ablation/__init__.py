"""Ablation of heads, MLPs and blocks: exact effects, importance, orders of removal, pairs."""

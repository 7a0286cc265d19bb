"""`vitlens rollout`: attention maps over all layers."""

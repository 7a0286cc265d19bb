"""`vitlens rollout`: attention followed through all layers to the image."""

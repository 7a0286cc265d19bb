"""`vitlens predict`: the most probable classes of every image."""

"""`vitlens predict`: the likeliest classes of every image."""

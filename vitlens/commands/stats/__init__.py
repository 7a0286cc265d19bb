"""`vitlens stats`: statistics of every attention head, and what each specialises in."""

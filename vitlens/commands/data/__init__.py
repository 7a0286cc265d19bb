"""`vitlens data`: lists the named data sets, or the parts of one of them."""

"""`vitlens data`: the data sets that have a name, and what one of them holds."""

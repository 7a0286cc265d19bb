"""`vitlens explain`: attribution maps by any method, and checks of the methods."""

"""`vitlens study --kind transfer`: what measure and report share, free of torch."""

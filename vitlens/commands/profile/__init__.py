"""`vitlens profile`: what models cost."""

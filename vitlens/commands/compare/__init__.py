"""`vitlens compare`: two models on the same labelled images."""

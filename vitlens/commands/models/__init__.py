"""`vitlens models`: what can be loaded, and which commands each model supports."""

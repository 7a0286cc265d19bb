"""`vitlens train --check`: whether a model, its data and its recipe can be trained at all; free of torch itself."""

"""`vitlens train`: a preset from scratch, or a trained model further, in a folder that is itself a MODEL."""

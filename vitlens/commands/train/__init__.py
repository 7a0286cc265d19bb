"""`vitlens train`: train a preset from scratch, or fine-tune a trained model; the run folder is
itself a MODEL.
"""

"""Activation patching, direct logit attribution and the logit lens: what a prediction is made of, part by part."""

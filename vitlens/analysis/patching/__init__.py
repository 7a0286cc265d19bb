"""Activation patching, direct logit attribution and the logit lens."""

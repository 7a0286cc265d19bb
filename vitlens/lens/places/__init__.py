"""Places in a model with stable names: listed, captured, changed, and patched from one run into another."""

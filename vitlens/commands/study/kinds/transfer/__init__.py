"""A study that adapts one trained model to other data."""

"""A study of training with and without labels."""

"""Sparse autoencoders: directions of a layer, what they stand for, and tests of that."""

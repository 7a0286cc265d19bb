"""The figures of `train`."""

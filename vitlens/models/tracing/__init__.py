"""The anatomy of any module, read from forward passes instead of attribute names."""

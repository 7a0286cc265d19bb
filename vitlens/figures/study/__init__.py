"""The figures of `study`."""

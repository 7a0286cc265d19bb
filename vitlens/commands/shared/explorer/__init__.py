"""The attention explorer of a run: measured once, kept in the run's folder, read back by its report."""

"""Model sources: one file and one registry entry each."""

"""Where models come from: one file and one registry entry a source."""

"""The instrument: one door to every attention head."""

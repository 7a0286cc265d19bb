"""Statistics and specialisation of every attention head."""

"""Studies of small models that differ in one factor."""

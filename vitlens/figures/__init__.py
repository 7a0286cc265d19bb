"""Numbers in, Figure out; never runs a model, never saves."""

"""One file a command: load, compute, draw, write."""

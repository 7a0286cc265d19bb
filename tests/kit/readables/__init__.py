"""Examples of what is read, noted or refused; tests/kit/readable.py lists them all."""

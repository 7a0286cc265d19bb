"""How often the tool names a cause that was planted in a model: `python -m benchmarks.planted`."""

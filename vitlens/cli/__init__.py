"""The command line: parse, and call one run."""

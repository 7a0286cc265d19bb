"""One head's attention step by step, each step checked against the model."""

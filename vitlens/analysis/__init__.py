"""One file a word: pure functions on tensors, and below them the public one that takes a model."""

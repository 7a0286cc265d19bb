"""What a model loses without a head, an MLP or a block: exact effects, importance, orders of removal, pairs."""

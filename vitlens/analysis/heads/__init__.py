"""Statistics of every attention head (distance, entropy, sparsity, sinks), and what each head specialises in."""

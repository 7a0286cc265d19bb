"""Statistics of every attention head (distance, entropy, sparsity, sinks), and the specialisation
of each head.
"""

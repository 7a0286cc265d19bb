"""Features at every layer: k-NN, linear probe, CKA, t-SNE, retrieval, zero-shot."""

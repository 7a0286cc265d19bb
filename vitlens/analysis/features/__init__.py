"""Features at every layer, and what they separate: k-NN, linear probe, CKA, t-SNE, retrieval,
zero-shot.
"""

"""What `vitlens train --track` sends to TensorBoard and Weights & Biases."""

"""Models: our own ViT and ResNet, and those of other libraries, as one type."""

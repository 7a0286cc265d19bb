"""The models: a ViT and a ResNet of our own, and those of other libraries, as one type."""

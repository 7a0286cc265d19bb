"""The specimens: a ViT and a ResNet of our own, and everybody else's behind one door."""

"""The models: a ViT and a ResNet of our own, and everybody else's behind one door."""

from vitlens.startup import import_without_compiler

import_without_compiler("torchvision")

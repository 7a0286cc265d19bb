"""What the decision of each kind of study leaves open; free of torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

UNTESTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "architecture": "other widths and patch sizes, other orders of adding the parts, a learning rate of its own for"
        " each point, longer training, and more data",
        "patch-size": "larger images (a patch of 4 px at 32 px covers as much as one of 28 px at 224 px), objects of "
        "other sizes, a width or depth of its own for each patch size, and tasks that need fine maps",
        "pooling": "larger models, longer training, attention pooling, both poolings together, and uses of the "
        "features other than classification",
        "size": "a recipe of its own for each size, longer training, more data, and sizes other than these presets",
        "data": "pretrained weights, a recipe of its own for each share, larger models, longer training, and "
        "more images than there were",
        "registers": "large models and long training, in which high-norm tokens appear (Darcet 2024), and tasks that"
        " need clean maps rather than accuracy",
        "positions": "relative and rotary positions, images of another size than in training (where learned "
        "embeddings are interpolated and fixed ones computed again), longer training, and data in which"
        " places matter more or less",
        "swin": "larger images, where the ViT's attention grows with the square of the number of patches and "
        "Swin's with the number (`vitlens profile vit-micro swin-micro --sizes 32,64,128`); longer "
        "training and a recipe of its own for each; pretrained weights; tasks that need maps, such as "
        "segmentation",
    }
)

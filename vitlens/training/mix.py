"""Mixup and CutMix: two images in one, with both labels, through torchvision's transforms."""

import torch
from torch import Tensor
from torchvision.transforms import v2

from vitlens.shapes import Images


def mix(
    images: Images, labels: Tensor, *, classes: int, mixup: float, cutmix: float, chance: float
) -> tuple[Images, Tensor]:
    """The images, each mixed with another one of the batch, and their targets (batch, classes).

    mixup, cutmix: parameters of the Beta distribution of the share (Zhang 2018; Yun 2019), 0: not this one; where
    both are given one is drawn a batch; chance: that the batch is mixed at all. Draws come from torch's generator.
    A batch left as it is keeps its labels (batch,).
    """
    kinds = [made for alpha, made in ((mixup, v2.MixUp), (cutmix, v2.CutMix)) if alpha]
    if not kinds or len(images) < 2 or torch.rand(()).item() >= chance:
        return images, labels
    kind = kinds[int(torch.randint(len(kinds), ()).item())]
    alpha = mixup if kind is v2.MixUp else cutmix
    mixed, targets = kind(alpha=alpha, num_classes=classes)(images, labels)
    return mixed, targets

"""A model that reads the class off the first pixel: red 10 is class 1, red 20 class 2.

Red 255 breaks it.
"""

import torch
from torch import Tensor, nn

from tests.kit.tiny import bare
from vitlens.models.model import Model


class Reader(nn.Module):
    def __init__(self, classes: int, margin: float | None) -> None:
        super().__init__()
        self.classes = classes
        self.margin = margin
        self.drop = nn.Dropout(0.9)  # shows when it is not in evaluation mode

    def forward(self, images: Tensor) -> Tensor:
        red = (images[:, 0, 0, 0] * 255).round()
        answer = (red / 10).long().clamp(max=self.classes - 1)
        is_answer = nn.functional.one_hot(answer, self.classes)  # (images, classes)
        if self.margin is None:
            probability = images[:, 1, 0, 0].clamp(1e-6, 1 - 1e-6)[:, None]
            of_others = (1 - probability) / (self.classes - 1)
            logits = torch.where(is_answer == 1, probability, of_others).log()
        else:
            logits = self.margin * is_answer
        is_broken = red[:, None] == 255
        return self.drop(torch.where(is_broken, torch.nan, logits))


def reader(classes: tuple[str, ...] = ("a", "b", "c"), *, margin: float | None = 5.0) -> Model:
    """Build a model that reads its answer from the first pixel.

    margin: by which the logit of the answer is greater than the others; None: the first pixel's
    green is the probability of the answer.
    """
    return bare(Reader(len(classes), margin), (4, 6), alias="reader", classes=classes)


def confident() -> Model:
    """Return a reader of five classes that says how sure it is; for `--model-file`."""
    return reader(tuple("abcde"), margin=None)

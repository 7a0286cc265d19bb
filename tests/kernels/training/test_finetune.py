"""Which modules a partial fine-tuning trains, and their modes."""

import pytest
from torch import nn

import vitlens
from vitlens.training.finetune import partly_trainable


class HeadFirst(nn.Module):
    """A module that defines its head before its blocks, and has dropout in and after them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Dropout(), nn.Linear(8, 4))
        self.drop = nn.Dropout()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            self.blocks.append(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout()))

    def forward(self, images):
        tokens = self.drop(self.stem(images).flatten(2).transpose(1, 2))
        for block in self.blocks:
            tokens = tokens + block(tokens)
        return self.head(tokens.mean(1))


@pytest.mark.parametrize(
    ("last", "names"), [(0, {"head.0"}), (1, {"head.0", "blocks.1.2"}), (2, None)]
)
def test_dropout_of_frozen_blocks_is_off_with_a_head_that_is_defined_before_them(last, names):
    model = vitlens.wrap(
        HeadFirst(), image_size=16, mean=(0, 0, 0), std=(1, 1, 1), blocks=("blocks.0", "blocks.1")
    )
    if names is None:
        names = {"head.0", "blocks.0.2", "blocks.1.2"}
    with partly_trainable(model, last=last):
        active = set()
        for name, module in model.module.named_modules():
            if isinstance(module, nn.Dropout) and module.training:
                active.add(name)
    assert active == names

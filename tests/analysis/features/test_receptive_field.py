"""The effective receptive field: exact zeros where nothing can be seen, and its numbers on known gradients."""

import pytest
import torch
from torch import Tensor, nn

from tests.lens.tiny import images, model_of, our_swin, ours
from vitlens.analysis.features.receptive_field import receptive_field
from vitlens.models.resnet import CifarResNet


def test_windows_without_shift_see_one_window_and_with_shift_more() -> None:
    still, moving = (receptive_field(our_swin(shift=shift), images()) for shift in (False, True))
    assert [field.layer for field in still] == [0, 1, 2, 3]
    assert still[0].seen == still[1].seen == 8 * 8 / 32**2  # 4x4 patches of 2 px
    assert (still[0].field[16:24, 16:24] > 0).all()
    assert still[2].seen == still[3].seen == 16 * 16 / 32**2  # merged patches are twice as large
    assert moving[0].seen == still[0].seen
    assert moving[1].seen == 16 * 16 / 32**2  # a shifted window touches four plain ones
    assert moving[1].distance.value > still[1].distance.value


def test_a_vit_sees_everything_at_once_and_a_convolution_one_pixel_a_side() -> None:
    fields = receptive_field(ours(depth=3, registers=3), images((32, 48)))
    assert [field.seen for field in fields] == [1.0] * 3
    row, column = divmod(int(fields[0].field.argmax()), 48)  # patches of 8x16 px after the prefix
    assert (row // 8, column // 16) == (2, 1)
    (first, *_) = receptive_field(model_of(CifarResNet(3, 5).eval(), alias="cnn"), images())
    assert first.seen == 15 * 15 / 32**2  # the stem and six convolutions of the first stage


class Weighted(nn.Module):
    """A map whose cells are the pixels, each times a number, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.Conv2d(3, 4, 5, padding=2, bias=False)
        nn.init.ones_(self.sums.weight)
        self.head = nn.Linear(4, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.sums(pixels).mean((2, 3)))


def test_numbers_of_an_even_field() -> None:
    """4 channels and 3 colours, each gradient 2 (pixels are scaled to [-1, 1]): the norm is the root of 4 x 3 x 2²."""
    model = model_of(Weighted().eval(), alias="sums", size=(9, 9))
    (field,) = receptive_field(model, images((9, 9)), draws=2000)
    assert field.field[4, 4] == pytest.approx(48**0.5, rel=0.08)
    (field,) = receptive_field(model, images((9, 9)), draws=2)
    box = torch.zeros(9, 9, dtype=torch.bool)
    box[2:7, 2:7] = True
    assert torch.equal(field.field > 0, box)
    steps = torch.arange(-2, 3).double()
    mean = (steps[:, None] ** 2 + steps**2).sqrt().mean()
    assert field.distance.value == pytest.approx(float(mean), rel=1e-5)
    assert field.half.value == 13 / 81
    assert field.distance.n == 2


def test_each_image_by_itself_and_the_seed_and_nothing_is_left_behind() -> None:
    model, batch = our_swin(), images(batch=3)
    before = batch.clone()
    together, again = (receptive_field(model, batch, seed=1) for _ in range(2))
    assert all(torch.equal(one.field, other.field) for one, other in zip(together, again))
    alone = receptive_field(our_swin(), batch[:1], seed=1)
    assert alone[0].distance.low is None
    assert not torch.equal(alone[-1].field, together[-1].field)
    assert torch.equal(batch, before)
    assert batch.grad is None
    assert not any(module._forward_hooks for module in model.modules())

"""Specimen: pixels in, normalisation inside, its own size; gradients and modes where they belong."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.lens.tiny import images, ours, specimen_of, timm_specimen, torchvision_swin
from vitlens.errors import UnsupportedError
from vitlens.models.assembly import assemble
from vitlens.models.build import Architecture
from vitlens.models.specimen import Provenance, Specimen, trainable
from vitlens.preprocessing import Preprocessing


def with_preprocessing(preprocessing: Preprocessing) -> Specimen:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    return assemble(model, Architecture("timm", "x"), preprocessing, ("a", "b"), "x", Provenance("x", "random"))


def test_normalisation_is_the_first_step():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    specimen = with_preprocessing(Preprocessing((8, 8), mean=mean, std=std))
    batch = images((8, 8))
    expected = torch.stack([(batch[:, c] - mean[c]) / std[c] for c in range(3)], 1)
    torch.testing.assert_close(specimen.prepare(batch), expected)
    torch.testing.assert_close(specimen(batch), specimen.model(expected))


@pytest.mark.parametrize("size", [(8, 9), (20, 30), (4, 4)])
def test_other_sizes_are_resized_with_a_gradient(size):
    specimen = with_preprocessing(Preprocessing((8, 8)))
    batch = images(size).requires_grad_()
    prepared = specimen.prepare(batch)
    expected = F.interpolate(batch, size=(8, 8), mode="bilinear", antialias=True)
    torch.testing.assert_close(prepared, (expected - 0.5) / 0.5)
    assert torch.autograd.grad(specimen(batch).sum(), batch)[0].abs().sum() > 0


def test_its_own_size_is_left_alone():
    specimen = with_preprocessing(Preprocessing((8, 8), mean=(0.0,) * 3, std=(1.0,) * 3))
    batch = images((8, 8))
    assert torch.equal(specimen.prepare(batch), batch)


def test_normalisation_is_no_part_of_the_weights():
    specimen = ours()
    assert not any("mean" in key or "std" in key for key in specimen.state_dict())
    assert specimen.parameter_count() == sum(p.numel() for p in specimen.model.parameters())


def test_a_model_without_a_sequence_of_tokens_says_so():
    for specimen in (torchvision_swin(), specimen_of(nn.Sequential(nn.Conv2d(3, 5, 32), nn.Flatten()))):
        with pytest.raises(UnsupportedError, match="has no one sequence of tokens"):
            _ = specimen.layout


def test_a_distilled_model_in_training_mode_answers_with_one():
    specimen = timm_specimen("deit_tiny_distilled_patch16_224")
    specimen.train()
    assert hasattr(specimen.model, "set_distilled_training")
    specimen.model.set_distilled_training(True)
    first, second = specimen.model(specimen.prepare(images()))
    torch.testing.assert_close(specimen(images()), (first + second) / 2)


def test_trainable_brings_flags_and_modes_back():
    specimen = ours()
    next(specimen.parameters()).requires_grad_(True)
    specimen.model.blocks[1].train()
    flags = [parameter.requires_grad for parameter in specimen.parameters()]
    modes = [module.training for module in specimen.modules()]
    with trainable(specimen) as same:
        assert same is specimen
        assert all(parameter.requires_grad for parameter in specimen.parameters())
        assert all(module.training for module in specimen.modules())
    assert [parameter.requires_grad for parameter in specimen.parameters()] == flags
    assert [module.training for module in specimen.modules()] == modes
    with pytest.raises(KeyError), trainable(specimen):
        raise KeyError
    assert [parameter.requires_grad for parameter in specimen.parameters()] == flags

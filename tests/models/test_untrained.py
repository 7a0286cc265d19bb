"""A model of the same architecture with random weights."""

import pytest
import torch
from torch import nn

import vitlens
from vitlens.errors import UnsupportedError
from vitlens.models.rebuild import for_classes, untrained_like


def state(model: vitlens.Model) -> dict[str, torch.Tensor]:
    return dict(model.module.state_dict())


def test_it_has_the_same_shapes_and_other_weights_that_depend_on_the_seed():
    vit = for_classes(vitlens.load("vit-digits"), ("cat", "dog"))
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, again, other = (untrained_like(vit, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.classes == ("cat", "dog")
    assert first.provenance.weights == "random"
    shapes = {name: value.shape for name, value in state(vit).items()}
    assert {name: value.shape for name, value in state(first).items()} == shapes
    name = next(name for name in shapes if name.endswith("qkv.weight"))
    assert torch.equal(state(first)[name], state(again)[name])
    assert not torch.equal(state(first)[name], state(other)[name])
    assert not torch.equal(state(first)[name], state(vit)[name])
    assert first(torch.rand(2, 3, 32, 32)).shape == (2, 2)


def test_of_a_timm_model_at_another_size():
    model = vitlens.load("timm:deit_tiny_patch16_224", random_weights=True, image_size=(64, 64))
    made = untrained_like(for_classes(model, ("a", "b", "c")), seed=1)
    assert (made.alias, made.input_size) == (model.alias, (64, 64))
    assert made(torch.rand(1, 3, 64, 64)).shape == (1, 3)


def test_a_model_that_only_its_code_can_make_is_refused():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3 * 64, 4)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(images.flatten(1))

    model = vitlens.wrap(Net(), image_size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, classes=tuple("abcd"))
    with pytest.raises(UnsupportedError, match="expected an architecture that can be built anew"):
        untrained_like(model, seed=0)

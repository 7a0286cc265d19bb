"""Partial fine-tuning: gradients and modes, which are restored."""

import pytest
import torch

from tests.kit.trainings import CLASSES, tiny_model
from tests.kit.uses import BrokenError
from vitlens.errors import InputError
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.training.finetune import partly_trainable, require_last, require_learned, trained_names, trained_share


def cnn() -> Model:
    return untrained("resnet20", classes=CLASSES)


def trained_after(model: Model, last: int | None) -> set[str]:
    """The parameters that have a gradient after one backward pass."""
    with partly_trainable(model, last=last):
        model(torch.rand(2, 3, *model.input_size)).square().sum().backward()
        return {name for name, value in model.module.named_parameters() if value.grad is not None}


def test_everything_the_last_block_or_the_head() -> None:
    names = [name for name, _ in tiny_model().module.named_parameters()]
    assert trained_after(tiny_model(), None) == set(names)
    assert trained_after(tiny_model(), 0) == {"head.weight", "head.bias"}
    last = {name for name in names if name.startswith(("blocks.1.", "norm.", "head."))}
    assert trained_after(tiny_model(), 1) == last == trained_names(tiny_model(), last=1)
    both = {name for name in names if name.startswith(("blocks.", "norm.", "head."))}
    assert trained_after(tiny_model(), 2) == both


def test_a_cnns_stages_and_its_head() -> None:
    names = trained_after(cnn(), 3)
    assert names == {name for name, _ in cnn().module.named_parameters() if name.startswith(("layer3.", "fc."))}


def test_both_heads_of_a_distilled_model() -> None:
    model = load("timm:deit_tiny_distilled_patch16_224", random_weights=True, image_size=(32, 32))
    assert trained_names(model, last=0) == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}
    assert trained_share(model, last=0) == (2 * (192 * 1000 + 1000), model.parameter_count())
    assert trained_share(model, last=None)[0] == model.parameter_count()


@pytest.mark.parametrize("last", [0, 1])
def test_frozen_modules_are_in_evaluation_mode_and_are_restored(last: int) -> None:
    model = tiny_model().eval().requires_grad_(False)
    first, second = model.module.get_submodule("blocks.0"), model.module.get_submodule("blocks.1")
    with partly_trainable(model, last=last):
        assert not any(module.training for module in first.modules())
        assert all(module.training for module in second.modules()) == bool(last)
        assert model.module.get_submodule("head").training
        assert not model.module.get_submodule("pos_drop").training
    with pytest.raises(BrokenError), partly_trainable(model, last=last):
        raise BrokenError
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_frozen_batch_statistics_stay() -> None:
    model = cnn()
    before = {name: value.clone() for name, value in model.module.named_buffers()}
    with partly_trainable(model, last=3):
        model(torch.rand(4, 3, 32, 32))
    after = dict(model.module.named_buffers())
    for name, value in before.items():
        assert torch.equal(after[name], value) == (not name.startswith("layer3.")), name


def test_more_blocks_than_there_are_and_random_weights_are_refused() -> None:
    for last in (3, -1):
        with pytest.raises(InputError, match=f"--train-last from 1 to 2, the blocks of vit-mini, found {last}"):
            require_last(tiny_model(), last)
    with pytest.raises(InputError, match="found vit-mini with random weights; give timm:"):
        require_learned(tiny_model(), option="--freeze-backbone")
    require_learned(load("vit-digits"), option="--freeze-backbone")

"""The randomisation check: what it changes, that it puts it back, and whom it flags."""

import pytest
import torch
from torch import Tensor

from tests.lens.tiny import images, ours, timm_model, torchvision_vit
from vitlens.analysis.attention.methods import relevance
from vitlens.analysis.faithfulness.randomisation import Randomisation, randomisation, randomised, weight_groups
from vitlens.errors import InputError
from vitlens.models.loading import load
from vitlens.models.model import Model

MODELS = {
    "ours": ours,
    "timm": lambda: timm_model("deit_tiny_distilled_patch16_224"),
    "swin": lambda: timm_model("swin_tiny_patch4_window7_224"),
    "torchvision": torchvision_vit,
    "cnn": lambda: load("cnn-digits"),
}


def weights(model: Model) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def edges(_model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
    """A method that shows the image and knows no model."""
    return (batch[:, :, 1:, 1:] - batch[:, :, :-1, :-1]).abs().sum(1)


@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_every_weight_once_from_the_head_down(name):
    model = MODELS[name]()
    found = weight_groups(model, parts=2)
    names = [name for stage in found for name in stage.parameters]
    assert sorted(names) == sorted(name for name, _ in model.module.named_parameters())
    assert (found[0].name, found[-1].name) == ("head", "embedding")
    assert any("head" in name or "fc" in name for name in found[0].parameters)
    assert all("blocks" not in name for name in found[0].parameters)
    assert found[1].name.startswith("block")
    last = model.anatomy.blocks[-1]
    assert all(name.startswith(last) for name in found[1].parameters) or len(model.anatomy.blocks) > 2


@pytest.mark.parametrize("name", MODELS)
def test_weights_come_back_bit_by_bit(name):
    model = MODELS[name]()
    before = weights(model)
    every = weight_groups(model)
    with randomised(model, every, seed=3):
        inside = weights(model)
    changed = {key for key in before if not torch.equal(before[key], inside[key])}
    assert {f"module.{key}" for key, value in model.module.named_parameters() if value.unique().numel() > 4} <= changed
    for key in before:
        assert torch.equal(before[key].flatten().sort().values, inside[key].flatten().sort().values)
    after = weights(model)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_weights_come_back_after_an_exception_and_when_nested(error):
    model = ours()
    before, every = weights(model), weight_groups(model)
    with pytest.raises(error), randomised(model, every[:2]), randomised(model, every, seed=1):
        raise error
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())

    def breaks(own: Model, batch: Tensor, targets: Tensor) -> Tensor:
        if not torch.equal(own.module.head.weight, before["module.head.weight"]):
            raise error
        return relevance(own, batch, targets=targets)

    with pytest.raises(error):
        randomisation(model, images((32, 48)), torch.tensor([0, 1]), breaks)
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())


def test_the_head_alone_changes_the_head_alone():
    model = ours()
    before = weights(model)
    with randomised(model, weight_groups(model)[:1]):
        inside = weights(model)
    changed = {key for key in before if not torch.equal(before[key], inside[key])}
    assert changed
    assert all(key.startswith(("module.head", "module.norm")) for key in changed)


def test_a_weights_draw_is_its_own():
    """Whether the head alone is randomised or all of it, the head becomes the same."""
    model = ours()
    found = []
    for count in (1, None):
        with randomised(model, weight_groups(model)[:count], seed=5):
            found.append(weights(model)["module.head.weight"])
    assert torch.equal(*found)


def test_a_method_that_knows_no_model_is_flagged_and_relevance_is_not():
    model = load("vit-digits")
    batch, targets = images((32, 32), batch=4), torch.tensor([0, 1, 2, 3])
    found = randomisation(model, batch, targets, edges, parts=2)
    assert found.names[0] == "head"
    assert found.correlation.shape == (len(found.names), 4)
    torch.testing.assert_close(found.correlation, torch.ones_like(found.correlation))
    assert float(found.values["cascade"].min()) == pytest.approx(1.0)
    other = randomisation(model, batch, targets, lambda s, i, t: relevance(s, i, targets=t), parts=2)
    estimate = other.stages()[-1].similarity
    assert estimate.low <= estimate.value <= estimate.high < 0.5
    assert estimate.n == 4


def test_the_whole_cascade_is_one_number():
    never = Randomisation(("head", "block 0"), torch.ones(2, 3))
    assert never.values["cascade"].tolist() == [1.0] * 3
    half = Randomisation(("head", "block 0"), torch.tensor([[1.0, 0.5, torch.nan], [0.0, 0.1, torch.nan]]))
    assert half.values["cascade"].tolist() == pytest.approx([0.5, 0.3])
    assert half.values["randomisation"].tolist() == pytest.approx([0.0, 0.1])


def test_constant_maps():
    before = Randomisation(("head",), torch.tensor([[torch.nan, torch.nan]]))
    assert before.judged().lack == "uniform maps"

    state = {"calls": 0}

    def falls_silent(_model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
        state["calls"] += 1
        return batch[:, 0] if state["calls"] == 1 else torch.zeros_like(batch[:, 0])

    found = randomisation(ours(), images((32, 48)), torch.tensor([0, 1]), falls_silent)
    assert found.correlation.eq(0).all()
    with pytest.raises(InputError, match="finite maps"):
        randomisation(ours(), images((32, 48)), torch.tensor([0, 1]), lambda _s, i, _t: i[:, 0] / 0)

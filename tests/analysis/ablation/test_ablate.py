"""Effects of removing units, against full forwards with the same intervention in force."""

from dataclasses import replace

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.lens.tiny import images, model_of, ours, timm_model
from vitlens.analysis.ablation.ablate import ablate, measure_effects, measure_jointly, units_of
from vitlens.analysis.ablation.effects import Effects, Unit
from vitlens.analysis.ablation.first_order import first_order
from vitlens.analysis.ablation.replacements import MeanOutputs, means_of, other_images
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.lens.intervene import intervened
from vitlens.lens.interventions import BlockRemoved, HeadReplaced, MLPReplaced
from vitlens.lens.replay import replaying
from vitlens.models.model import Model
from vitlens.models.resnet import resnet20
from vitlens.names import REPLACEMENTS, Replacement

LABELS = torch.tensor([0, 1, 2, 3, 4])


def seen(batch: int = 5, seed: int = 0) -> Tensor:
    return images((32, 48), batch=batch, seed=seed)


def full_loss(model: Model, pictures: Tensor, labels: Tensor, *interventions: object, **tensors: object) -> Tensor:
    with intervened(model, interventions, **tensors) as changed, torch.no_grad():
        return F.cross_entropy(changed(pictures), labels, reduction="none").double()


def read_heads(model: Model, pictures: Tensor, layer: int) -> Tensor:
    with replaying(model, pictures) as replay:
        return replay.head_output(layer)


def test_units_are_all_heads_mlps_and_blocks() -> None:
    model = ours()
    assert [unit.name for unit in units_of(model)] == [
        *("head/0/0", "head/0/1", "head/1/0", "head/1/1", "mlp/0", "mlp/1", "block/0", "block/1")
    ]
    assert [unit.name for unit in units_of(model, kinds=("block",))] == ["block/0", "block/1"]


def test_unknown_names_say_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own check of types would be first
    model = ours()
    with pytest.raises(UnknownNameError, match="no kind of unit 'heads'; did you mean 'head'"):
        units_of(model, kinds=("heads",))  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="no replacement 'means'; did you mean 'mean'"):
        measure_effects(model, seen(), LABELS, units_of(model), replace="means")  # type: ignore[arg-type]


def test_a_cnn_has_no_units() -> None:
    with pytest.raises(UnsupportedError, match="attention"):
        units_of(model_of(resnet20(classes=5)))


def test_pooling_of_siglip_is_no_block() -> None:
    model = timm_model("vit_base_patch16_siglip_224")
    blocks = units_of(model, kinds=("block",))
    assert [unit.layer for unit in blocks] == [0, 1]
    assert len(units_of(model, kinds=("head",))) > 4  # its pooling has heads too


def test_a_unit_says_what_removes_it() -> None:
    assert Unit("head", 1, 0).intervention("zero") == HeadReplaced(1, 0, "zero")
    assert Unit("head", 1, 0).intervention("mean") == HeadReplaced(1, 0, "mean")
    assert Unit("head", 1, 0).intervention("resample") == HeadReplaced(1, 0, "given", "another image")
    assert Unit("mlp", 1).intervention("resample") == MLPReplaced(1, "given", "another image")
    assert {Unit("block", 1).intervention(by) for by in REPLACEMENTS} == {BlockRemoved(1)}
    with pytest.raises(InputError, match="expected a number for a head"):
        Unit("head", 1)
    with pytest.raises(InputError, match="expected a number for a head"):
        Unit("mlp", 1, 0)


@pytest.mark.parametrize("budget", [1 << 30, 0])
@pytest.mark.parametrize("family", ["ours", "deit3_small_patch16_224", "swin_tiny_patch4_window7_224"])
def test_effects_by_zero_equal_full_forwards(family: str, budget: int) -> None:
    model = ours() if family == "ours" else timm_model(family)
    pictures = images(model.input_size, batch=5)
    units = units_of(model)
    effects = measure_effects(model, pictures, LABELS, units, replace="zero", budget=budget)
    for unit, loss, correct in zip(units, effects.loss, effects.correct):
        with intervened(model, unit.intervention("zero")) as changed, torch.no_grad():
            logits = changed(pictures)
        torch.testing.assert_close(loss, F.cross_entropy(logits, LABELS, reduction="none").double(), atol=1e-5, rtol=0)
        assert correct.tolist() == (logits.argmax(-1) == LABELS).tolist()
    plain = F.cross_entropy(model(pictures), LABELS, reduction="none").double()
    torch.testing.assert_close(effects.clean_loss, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(effects.delta_loss, effects.loss - plain, atol=1e-5, rtol=0)
    assert effects.delta_loss.abs().max() > 1e-3


def test_mean_is_that_of_the_data_at_each_token() -> None:
    model, pictures, others = ours(), seen(), seen(7, seed=1)
    means = means_of(model, [pictures, others])
    units = units_of(model, kinds=("head", "mlp"))
    effects = measure_effects(model, pictures, LABELS, units, means=means)
    every = torch.cat([pictures, others])
    mean = read_heads(model, every, 1)[:, 1].mean(0)  # (tokens, head_dim)
    what = HeadReplaced(1, 1, "mean")
    expected = full_loss(model, pictures, LABELS, what, replacements={what: mean})
    torch.testing.assert_close(effects.loss[units.index(Unit("head", 1, 1))], expected, atol=1e-5, rtol=0)
    outputs = mlp_outputs(model, every, 0)
    what_mlp = MLPReplaced(0, "mean")
    expected = full_loss(model, pictures, LABELS, what_mlp, replacements={what_mlp: outputs.mean(0)})
    torch.testing.assert_close(effects.loss[units.index(Unit("mlp", 0))], expected, atol=1e-5, rtol=0)


def mlp_outputs(model: Model, pictures: Tensor, layer: int) -> Tensor:
    found: list[Tensor] = []
    hook = model.module.blocks[layer].mlp.register_forward_hook(lambda _m, _a, output: found.append(output))
    model(pictures)
    hook.remove()
    return found[0]


def test_without_means_those_of_the_batch() -> None:
    model, pictures = ours(), seen()
    units = units_of(model)
    own = measure_effects(model, pictures, LABELS, units)
    given = measure_effects(model, pictures, LABELS, units, means=means_of(model, [pictures]))
    torch.testing.assert_close(own.loss, given.loss, atol=1e-6, rtol=0)


@pytest.mark.parametrize("given", [False, True])
def test_resample_puts_in_another_images_output(given: bool) -> None:
    model, pictures = ours(), seen()
    units = units_of(model, kinds=("head", "mlp"))
    donors = seen(seed=3) if given else None
    effects = measure_effects(model, pictures, LABELS, units, replace="resample", donors=donors, seed=2, offset=7)
    source = pictures[other_images(5, seed=9)] if donors is None else donors
    head = HeadReplaced(0, 1, "given")
    expected = full_loss(model, pictures, LABELS, head, replacements={head: read_heads(model, source, 0)[:, 1]})
    torch.testing.assert_close(effects.loss[units.index(Unit("head", 0, 1))], expected, atol=1e-5, rtol=0)
    mlp = MLPReplaced(1, "given")
    expected = full_loss(model, pictures, LABELS, mlp, replacements={mlp: mlp_outputs(model, source, 1)})
    torch.testing.assert_close(effects.loss[units.index(Unit("mlp", 1))], expected, atol=1e-5, rtol=0)
    assert not model.module.blocks[1].mlp._forward_hooks


@pytest.mark.parametrize("count", [2, 3, 17])
def test_no_image_stands_in_for_itself(count: int) -> None:
    for seed in range(20):
        others = other_images(count, seed=seed)
        assert sorted(others.tolist()) == list(range(count))
        assert (others != torch.arange(count)).all()
    assert torch.equal(other_images(count, seed=1), other_images(count, seed=1))


def test_a_head_with_constant_output_is_not_missed_when_replaced_by_its_mean() -> None:
    model = ours()
    with torch.no_grad():  # values of head 0 in layer 0 are its bias, whatever the image
        qkv = model.module.blocks[0].attn.qkv
        qkv.weight[2 * 16 : 2 * 16 + 8] = 0
    effects = measure_effects(model, seen(), LABELS, (Unit("head", 0, 0), Unit("head", 0, 1)))
    assert effects.delta_loss[0].abs().max() < 1e-6
    assert effects.delta_loss[1].abs().max() > 1e-4
    zero = measure_effects(model, seen(), LABELS, (Unit("head", 0, 0),), replace="zero")
    assert zero.delta_loss.abs().max() > 1e-4


def test_several_at_once_equal_a_full_forward() -> None:
    model, pictures = ours(), seen()
    heads = units_of(model, kinds=("head",))
    sets = [(), tuple(heads), (heads[3], Unit("mlp", 0)), (heads[3], heads[0]), (heads[3],)]
    found = measure_jointly(model, pictures, LABELS, sets, replace="zero")
    for each, loss in zip(sets, found.loss):
        expected = full_loss(model, pictures, LABELS, *(unit.intervention("zero") for unit in each))
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    assert torch.equal(found.loss[0], found.clean_loss)


def test_batches_joined_are_the_whole() -> None:
    model, pictures = ours(), seen()
    units, means = units_of(model), means_of(model, [pictures])
    whole = measure_effects(model, pictures, LABELS, units, means=means)
    parts = [
        measure_effects(model, pictures[part], LABELS[part], units, means=means) for part in (slice(0, 2), slice(2, 5))
    ]
    joined = Effects.join(parts)
    torch.testing.assert_close(joined.loss, whole.loss, atol=1e-5, rtol=0)
    assert torch.equal(joined.correct, whole.correct)
    assert torch.equal(joined.labels, LABELS)
    assert joined.forward_equivalents == pytest.approx(whole.forward_equivalents)
    with pytest.raises(InputError, match="same units"):
        Effects.join([parts[0], replace(parts[1], replace="zero")])
    with pytest.raises(InputError, match="at least one batch"):
        Effects.join([])


def test_means_of_two_processes_join_to_those_of_one() -> None:
    model, pictures = ours(), seen()
    mine, theirs = means_of(model, [pictures[:2]]), means_of(model, [pictures[2:]])
    counted: list[Tensor] = [torch.tensor([3.0])]
    counted += [theirs._sums[key] for key in sorted(theirs._sums)]
    mine.join(lambda value: value + counted.pop(0))
    one = means_of(model, [pictures])
    assert mine.images == one.images == 5
    units = units_of(model)
    expected = one.replacements(units)
    for key, value in mine.replacements(units).items():
        torch.testing.assert_close(value, expected[key], atol=1e-6, rtol=0)
    with pytest.raises(InputError, match="expected the mean of head/0/0"):
        MeanOutputs().replacements(units)


def test_replays_cost_less_than_forwards() -> None:
    model = timm_model("vit_tiny_patch16_224", depth=6)
    units = units_of(model, kinds=("head",))
    effects = measure_effects(model, images(batch=5), LABELS, units, replace="zero")
    assert 1 < effects.forward_equivalents < 1 + 0.6 * len(units)


def test_advance_is_told_every_unit() -> None:
    told: list[int] = []
    model = ours()
    measure_effects(model, seen(), LABELS, units_of(model), advance=told.append)
    assert sum(told) == 8


def test_what_cannot_be_measured_is_said() -> None:
    model = ours()
    units = units_of(model)
    with pytest.raises(InputError, match="at least 2 images to resample"):
        measure_effects(model, seen(1), LABELS[:1], units, replace="resample")
    with pytest.raises(InputError, match="from 0 to 4, found 7"):
        measure_effects(model, seen(1), torch.tensor([7]), units)
    with pytest.raises(InputError, match="expected a head from 0 to 1"):
        measure_effects(model, seen(), LABELS, [Unit("head", 0, 5)], replace="zero")
    # numbers of images that do not fit are stopped by the annotations' shapes before, while tests run


def test_a_loss_that_is_not_finite_names_unit_and_image() -> None:
    model, pictures = ours(), seen()
    with torch.no_grad():
        model.module.head.weight[:] = torch.inf
    with pytest.raises(NonFiniteError, match="finite logits of ours"):
        measure_effects(model, pictures, LABELS, units_of(model), offset=10)
    model = ours()
    means = means_of(model, [pictures])
    means._sums["head", 1][1] = torch.inf
    with pytest.raises(NonFiniteError, match="on image 10 without head/1/1"):
        measure_effects(model, pictures, LABELS, units_of(model), means=means, offset=10)


@pytest.mark.parametrize("by", REPLACEMENTS)
def test_ablate_does_not_depend_on_the_batch_size(by: Replacement) -> None:
    model, pictures, labels = ours(), seen(9), torch.arange(9) % 5  # the mean takes at least 8 images
    whole, parts = (
        ablate(model, pictures, labels, replace=by, kinds=("head", "mlp"), batch_size=size) for size in (9, 4)
    )
    torch.testing.assert_close(whole.loss.mean, parts.loss.mean, atol=1e-5, rtol=0)
    torch.testing.assert_close(whole.loss.low, parts.loss.low, atol=1e-5, rtol=0)
    assert whole.delta_loss.shape == whole.low.shape == (2, 2)
    assert whole.n == 9


@pytest.mark.parametrize("by", REPLACEMENTS)
def test_first_order_is_the_slope_towards_the_replacement(by: Replacement) -> None:
    model, pictures = ours(), seen()
    units = units_of(model)
    estimate = first_order(model, pictures, LABELS, units, replace=by, seed=4)
    assert estimate[4:].isnan().all()  # MLPs and blocks
    step = 1e-2
    for row, unit in enumerate(units[:4]):
        assert unit.head is not None
        own = read_heads(model, pictures, unit.layer)[:, unit.head]
        source = own[other_images(5, seed=4)]
        target = {"zero": torch.zeros_like(own), "mean": own.mean(0).expand_as(own), "resample": source}[by]
        what = HeadReplaced(unit.layer, unit.head, "given")
        forth, back = (
            full_loss(model, pictures, LABELS, what, replacements={what: own + sign * step * (target - own)})
            for sign in (1, -1)
        )
        torch.testing.assert_close(estimate[row], (forth - back) / (2 * step), atol=2e-4, rtol=0)
    assert estimate[:4].abs().max() > 1e-2


def test_first_order_is_of_each_image_and_leaves_no_gradient() -> None:
    model, pictures = timm_model("swin_tiny_patch4_window7_224"), images(batch=5)
    units, means = (
        units_of(model, kinds=("head",)),
        means_of(timm_model("swin_tiny_patch4_window7_224"), [images()]),
    )
    whole = first_order(model, pictures, LABELS, units, means=means)
    alone = first_order(model, pictures[3:4], LABELS[3:4], units, means=means)
    torch.testing.assert_close(whole[:, 3:4], alone, atol=1e-5, rtol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_mean_over_few_images_is_not_taken() -> None:
    model, pictures = ours(), seen()
    with pytest.raises(InputError, match="at least 8 images"):
        ablate(model, pictures, LABELS, replace="mean")
    with pytest.raises(InputError, match="at least 2 images"):
        ablate(model, pictures[:1], LABELS[:1], replace="resample")
    for count, by in ((5, "resample"), (1, "zero")):
        found = ablate(model, pictures[:count], LABELS[:count])
        assert found.replace == by
        assert "8" in found.note
    found = ablate(model, torch.cat([pictures, pictures]), LABELS.repeat(2))
    assert (found.replace, found.note) == ("mean", "")

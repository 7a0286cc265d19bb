"""Effects of removing units, against full forwards with the same intervention in force."""

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.lens.tiny import images, model_of, ours, timm_model
from vitlens.analysis.ablation.bench import Bench, Outcomes, other_images
from vitlens.analysis.ablation.importance import ablate, first_order
from vitlens.analysis.ablation.units import Unit, units_of
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.lens.capture import capture
from vitlens.lens.intervene import Change, intervene
from vitlens.models.model import Model
from vitlens.models.resnet import CifarResNet
from vitlens.names import REPLACEMENTS, Replacement

LABELS = torch.arange(8) % 5


def seen(batch: int = 8) -> Tensor:
    return images((32, 48), batch=batch)


def effects_of(bench: Bench, units: tuple[Unit, ...]) -> Outcomes:
    return bench.without([(unit,) for unit in units])


def full_loss(model: Model, pictures: Tensor, labels: Tensor, changes: dict[str, Change]) -> Tensor:
    with intervene(model, changes) as changed, torch.no_grad():
        return F.cross_entropy(changed(pictures), labels, reduction="none").double()


def removed(unit: Unit) -> Change:
    return "remove" if unit.kind == "block" else "zero"


def read_heads(model: Model, pictures: Tensor, layer: int) -> Tensor:
    place = f"blocks.{layer}.heads"
    return capture(model, pictures, place)[place]


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
        effects_of(Bench(model, seen(), LABELS, "means"), units_of(model))  # type: ignore[arg-type]


def test_a_cnn_has_no_units() -> None:
    with pytest.raises(UnsupportedError, match="attention"):
        units_of(model_of(CifarResNet(3, classes=5)))


def test_pooling_of_siglip_is_no_block() -> None:
    model = timm_model("vit_base_patch16_siglip_224")
    blocks = units_of(model, kinds=("block",))
    assert [unit.layer for unit in blocks] == [0, 1]
    assert len(units_of(model, kinds=("head",))) > 4  # its pooling has heads too


def test_a_unit_says_what_removes_it() -> None:
    units = (Unit("head", 1, 0), Unit("mlp", 1), Unit("block", 1))
    assert [unit.place for unit in units] == ["blocks.1.head.0", "blocks.1.mlp", "blocks.1"]
    with pytest.raises(InputError, match="expected a number for a head"):
        Unit("head", 1)
    with pytest.raises(InputError, match="expected a number for a head"):
        Unit("mlp", 1, 0)


@pytest.mark.parametrize("budget", [1 << 30, 0])
@pytest.mark.parametrize("family", ["ours", "deit3_small_patch16_224", "swin_tiny_patch4_window7_224"])
def test_effects_by_zero_equal_full_forwards(family: str, budget: int) -> None:
    model = ours() if family == "ours" else timm_model(family)
    pictures = images(model.input_size, batch=8)
    units = units_of(model)
    effects = effects_of(Bench(model, pictures, LABELS, "zero", budget=budget), units)
    for unit, loss, correct in zip(units, effects.loss, effects.correct):
        with intervene(model, {unit.place: removed(unit)}) as changed, torch.no_grad():
            logits = changed(pictures)
        torch.testing.assert_close(loss, F.cross_entropy(logits, LABELS, reduction="none").double(), atol=1e-5, rtol=0)
        assert correct.tolist() == (logits.argmax(-1) == LABELS).tolist()
    plain = F.cross_entropy(model(pictures), LABELS, reduction="none").double()
    torch.testing.assert_close(effects.clean_loss, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(effects.delta_loss, effects.loss - plain, atol=1e-5, rtol=0)
    assert effects.delta_loss.abs().max() > 1e-3


def mlp_outputs(model: Model, pictures: Tensor, layer: int) -> Tensor:
    found: list[Tensor] = []
    hook = model.module.blocks[layer].mlp.register_forward_hook(lambda _m, _a, output: found.append(output))
    model(pictures)
    hook.remove()
    return found[0]


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
    effects = effects_of(Bench(model, seen(), LABELS, "mean"), (Unit("head", 0, 0), Unit("head", 0, 1)))
    assert effects.delta_loss[0].abs().max() < 1e-6
    assert effects.delta_loss[1].abs().max() > 1e-4
    zero = effects_of(Bench(model, seen(), LABELS, "zero"), (Unit("head", 0, 0),))
    assert zero.delta_loss.abs().max() > 1e-4


def test_several_at_once_equal_a_full_forward() -> None:
    model, pictures = ours(), seen()
    heads = units_of(model, kinds=("head",))
    sets = [(), tuple(heads), (heads[3], Unit("mlp", 0)), (heads[3], heads[0]), (heads[3],)]
    found = Bench(model, pictures, LABELS, "zero").without(sets)
    for each, loss in zip(sets, found.loss):
        expected = full_loss(model, pictures, LABELS, {unit.place: removed(unit) for unit in each})
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    assert torch.equal(found.loss[0], found.clean_loss)


def test_replays_cost_less_than_forwards() -> None:
    model = timm_model("vit_tiny_patch16_224", depth=6)
    units = units_of(model, kinds=("head",))
    effects = effects_of(Bench(model, images(batch=8), LABELS, "zero"), units)
    assert 1 < effects.forward_equivalents < 1 + 0.6 * len(units)


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


@pytest.mark.parametrize("size", [None, 3])
def test_mean_is_that_of_the_data_at_each_token(size: int | None) -> None:
    model, pictures = ours(), seen()
    units = units_of(model, kinds=("head", "mlp"))
    effects = effects_of(Bench(model, pictures, LABELS, "mean", batch_size=size), units)
    mean = read_heads(model, pictures, 1)[:, 1].mean(0)  # (tokens, head_dim)
    expected = full_loss(model, pictures, LABELS, {"blocks.1.head.1": mean})
    torch.testing.assert_close(effects.loss[units.index(Unit("head", 1, 1))], expected, atol=1e-5, rtol=0)
    mean = mlp_outputs(model, pictures, 0).mean(0)
    expected = full_loss(model, pictures, LABELS, {"blocks.0.mlp": mean})
    torch.testing.assert_close(effects.loss[units.index(Unit("mlp", 0))], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [None, 3])
def test_resample_puts_in_another_images_output(size: int | None) -> None:
    model, pictures = ours(), seen()
    units = units_of(model, kinds=("head", "mlp"))
    effects = effects_of(Bench(model, pictures, LABELS, "resample", seed=2, batch_size=size), units)
    source = pictures[other_images(8, seed=2)]
    expected = full_loss(model, pictures, LABELS, {"blocks.0.head.1": read_heads(model, source, 0)[:, 1]})
    torch.testing.assert_close(effects.loss[units.index(Unit("head", 0, 1))], expected, atol=1e-5, rtol=0)
    expected = full_loss(model, pictures, LABELS, {"blocks.1.mlp": mlp_outputs(model, source, 1)})
    torch.testing.assert_close(effects.loss[units.index(Unit("mlp", 1))], expected, atol=1e-5, rtol=0)
    assert not model.module.blocks[1].mlp._forward_hooks


@pytest.mark.parametrize("by", REPLACEMENTS)
def test_batches_and_some_images_are_of_the_whole(by: Replacement) -> None:
    model = ours()
    bench, parts = (Bench(model, seen(), LABELS, by, batch_size=size) for size in (None, 3))
    units, some = units_of(model), torch.tensor([6, 1, 2])
    whole, joined = effects_of(bench, units), effects_of(parts, units)
    torch.testing.assert_close(joined.loss, whole.loss, atol=1e-5, rtol=0)
    assert torch.equal(joined.correct, whole.correct)
    assert torch.equal(joined.labels, LABELS)
    chosen = bench.without([(unit,) for unit in units], some)
    torch.testing.assert_close(chosen.loss, whole.loss[:, some], atol=1e-5, rtol=0)
    assert torch.equal(chosen.labels, LABELS[some])


@pytest.mark.parametrize("by", REPLACEMENTS)
def test_units_given_before_are_removed_with_each(by: Replacement) -> None:
    bench = Bench(ours(depth=3), seen(), LABELS, by)
    heads = units_of(bench.model, kinds=("head",))
    given = (heads[3], heads[0])
    left = [head for head in heads if head not in given]
    found = bench.without([(head,) for head in left], given=given)
    together = bench.without([(*given, head) for head in left])
    torch.testing.assert_close(found.loss, together.loss, atol=1e-5, rtol=0)


def test_what_cannot_be_measured_is_said() -> None:
    model = ours()
    units = units_of(model)
    with pytest.raises(InputError, match="at least 2 images to resample"):
        effects_of(Bench(model, seen(1), LABELS[:1], "resample"), units)
    with pytest.raises(InputError, match="from 0 to 4, found 7"):
        effects_of(Bench(model, seen(1), torch.tensor([7])), units)
    with pytest.raises(InputError, match=r"no place 'blocks\.0\.head\.5'"):
        effects_of(Bench(model, seen(), LABELS, "zero"), (Unit("head", 0, 5),))


def test_a_loss_that_is_not_finite_names_unit_and_image() -> None:
    model = ours()
    with torch.no_grad():
        model.module.head.weight[:] = torch.inf
    with pytest.raises(NonFiniteError, match="finite logits of ours"):
        effects_of(Bench(model, seen(), LABELS), units_of(model))
    bench = Bench(ours(), seen(), LABELS, "mean", batch_size=3)
    bench.known_means.sums["blocks.1.heads"][1] = torch.inf
    with pytest.raises(NonFiniteError, match="on image 3 without head/1/1"):
        bench.without([(Unit("head", 1, 1),)], torch.tensor([3]))
    with pytest.raises(NonFiniteError, match="on image 0 without head/1/1"):
        effects_of(bench, units_of(bench.model))


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("by", REPLACEMENTS)
def test_first_order_is_the_slope_towards_the_replacement(by: Replacement, size: int | None) -> None:
    model, pictures = ours(), seen()
    units = units_of(model)
    estimate = first_order(Bench(model, pictures, LABELS, by, seed=4, batch_size=size), units)
    assert estimate[4:].isnan().all()  # MLPs and blocks
    step = 1e-2
    for row, unit in enumerate(units[:4]):
        assert unit.head is not None
        own = read_heads(model, pictures, unit.layer)[:, unit.head]
        source = own[other_images(8, seed=4)]
        target = {"zero": torch.zeros_like(own), "mean": own.mean(0).expand_as(own), "resample": source}[by]
        forth, back = (
            full_loss(model, pictures, LABELS, {unit.place: own + sign * step * (target - own)}) for sign in (1, -1)
        )
        torch.testing.assert_close(estimate[row], (forth - back) / (2 * step), atol=2e-4, rtol=0)
    assert estimate[:4].abs().max() > 1e-2


def test_first_order_is_of_each_image_and_leaves_no_gradient() -> None:
    model = timm_model("swin_tiny_patch4_window7_224")
    bench = Bench(model, images(batch=8), LABELS, "mean")
    units = units_of(model, kinds=("head",))
    whole, alone = first_order(bench, units), first_order(bench.on(torch.tensor([3])), units)
    torch.testing.assert_close(whole[:, 3:4], alone, atol=1e-5, rtol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_mean_over_few_images_is_not_taken() -> None:
    model, pictures = ours(), seen(5)
    with pytest.raises(InputError, match="at least 8 images"):
        ablate(model, pictures, LABELS[:5], replace="mean")
    with pytest.raises(InputError, match="at least 2 images"):
        ablate(model, pictures[:1], LABELS[:1], replace="resample")
    for count, by in ((5, "resample"), (1, "zero")):
        found = ablate(model, pictures[:count], LABELS[:count])
        assert found.replace == by
        assert "8" in found.note
    found = ablate(model, seen(), LABELS)
    assert (found.replace, found.note) == ("mean", "")

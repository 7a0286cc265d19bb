"""Effects of removing units, against full forwards with the same intervention in force."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.lens.tiny import images, model_of, ours, timm_model
from vitlens.analysis.ablation.bench import Bench, Outcomes, Unit, units_of
from vitlens.analysis.ablation.importance import ablate, first_order
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.lens.capture import capture
from vitlens.lens.intervene import Change, another_image, intervene
from vitlens.models.model import Model
from vitlens.models.resnet import CifarResNet
from vitlens.names import REPLACEMENTS, Replacement

LABELS = torch.arange(8) % 5
CLOSE = {"atol": 1e-5, "rtol": 0.0}


def seen(batch: int = 8) -> Tensor:
    return images((32, 48), batch=batch)


def effects_of(bench: Bench, units: tuple[Unit, ...]) -> Outcomes:
    return bench.without([(unit,) for unit in units])


def full_logits(model: Model, pictures: Tensor, changes: dict[str, Change]) -> Tensor:
    with intervene(model, changes) as changed, torch.no_grad():
        return changed(pictures)


def full_loss(model: Model, pictures: Tensor, labels: Tensor, changes: dict[str, Change]) -> Tensor:
    return F.cross_entropy(full_logits(model, pictures, changes), labels, reduction="none").double()


def removed(*units: Unit) -> dict[str, Change]:
    return {unit.place: "remove" if unit.kind == "block" else "zero" for unit in units}


def replaced(model: Model, pictures: Tensor, unit: Unit, by: Replacement, seed: int) -> Tensor:
    """What stands in the place of a head or an MLP, from the places that the public lens captures."""
    own = capture(model, pictures, unit.place)[unit.place]
    return {"zero": torch.zeros_like(own), "mean": own.mean(0), "resample": own[another_image(len(own), seed)]}[by]


def test_units_are_all_heads_mlps_and_blocks() -> None:
    places = [
        *("blocks.0.head.0", "blocks.0.head.1", "blocks.1.head.0", "blocks.1.head.1"),
        *("blocks.0.mlp", "blocks.1.mlp", "blocks.0", "blocks.1"),
    ]
    units = units_of(ours())
    assert [unit.place for unit in units] == places
    assert [unit.name for unit in units[2:6]] == ["head/1/0", "head/1/1", "mlp/0", "mlp/1"]
    pooled = timm_model("vit_base_patch16_siglip_224")  # its attention pooling is no block, but has heads
    assert [unit.layer for unit in units_of(pooled, kinds=("block",))] == [0, 1]
    assert len(units_of(pooled, kinds=("head",))) > 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kinds": ("mlp", "heads")}, UnknownNameError, "no kind of unit 'heads'; did you mean 'head'"),
        ({"replace": "means"}, UnknownNameError, "no replacement 'means'; did you mean 'mean'"),
        ({"labels": torch.tensor([7])}, InputError, "from 0 to 4, found 7"),
        ({"replace": "resample"}, InputError, "at least 2 images"),
        ({"replace": "mean", "images": 5}, InputError, "at least 8 images.*--replace resample"),
        ({"model": lambda: model_of(CifarResNet(3, classes=5))}, UnsupportedError, "attention"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, error, message) -> None:
    given = {"model": ours, "images": 1, "labels": LABELS, **options}
    model, pictures, labels = given.pop("model")(), seen(given.pop("images")), given.pop("labels")
    with pytest.raises(error, match=message):
        ablate(model, pictures, labels[: len(pictures)], **given)


@pytest.mark.parametrize(
    ("family", "budget"),
    [("ours", 1 << 30), ("ours", 0), ("deit3_small_patch16_224", 1 << 30), ("swin_tiny_patch4_window7_224", 0)],
)
def test_effects_by_zero_equal_full_forwards(family: str, budget: int) -> None:
    model = ours() if family == "ours" else timm_model(family)
    pictures = images(model.input_size, batch=8)
    units = units_of(model)
    sets = [*((unit,) for unit in units), (), units[:4], (units[3], Unit("mlp", 0)), (units[3], units[0])]
    found = Bench(model, pictures, LABELS, "zero", budget=budget).without(sets)
    for each, loss, correct in zip(sets, found.loss, found.correct):
        logits = full_logits(model, pictures, removed(*each))
        torch.testing.assert_close(loss, F.cross_entropy(logits, LABELS, reduction="none").double(), **CLOSE)
        assert correct.tolist() == (logits.argmax(-1) == LABELS).tolist()
    assert torch.equal(found.loss[len(units)], found.clean_loss)
    torch.testing.assert_close(found.delta_loss, found.loss - found.loss[len(units)])
    assert found.delta_loss.abs().max() > 1e-3


def test_a_head_with_constant_output_is_not_missed_when_replaced_by_its_mean() -> None:
    model = ours()
    with torch.no_grad():  # values of head 0 in layer 0 are its bias, whatever the image
        model.module.blocks[0].attn.qkv.weight[2 * 16 : 2 * 16 + 8] = 0
    effects = effects_of(Bench(model, seen(), LABELS, "mean"), (Unit("head", 0, 0), Unit("head", 0, 1)))
    assert effects.delta_loss[0].abs().max() < 1e-6
    assert effects.delta_loss[1].abs().max() > 1e-4
    zero = effects_of(Bench(model, seen(), LABELS, "zero"), (Unit("head", 0, 0),))
    assert zero.delta_loss.abs().max() > 1e-4


def test_replays_cost_less_than_forwards() -> None:
    model = timm_model("vit_tiny_patch16_224", depth=6)
    units = units_of(model, kinds=("head",))
    effects = effects_of(Bench(model, images(batch=8), LABELS, "zero"), units)
    assert 1 < effects.forward_equivalents < 1 + 0.6 * len(units)


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("by", ["mean", "resample"])
def test_what_is_put_in_is_the_mean_of_the_data_or_another_images_output(by: Replacement, size: int | None) -> None:
    model, pictures = ours(), seen()
    units = units_of(model, kinds=("head", "mlp"))
    effects = effects_of(Bench(model, pictures, LABELS, by, seed=2, batch_size=size), units)
    for unit, loss in zip(units, effects.loss):
        new = replaced(model, pictures, unit, by, seed=2)
        torch.testing.assert_close(loss, full_loss(model, pictures, LABELS, {unit.place: new}), **CLOSE)


@pytest.mark.parametrize("by", REPLACEMENTS)
def test_batches_and_some_images_are_of_the_whole(by: Replacement) -> None:
    model = ours()
    bench, parts = (Bench(model, seen(), LABELS, by, batch_size=size) for size in (None, 3))
    units, some = units_of(model), torch.tensor([6, 1, 2])
    whole, joined = effects_of(bench, units), effects_of(parts, units)
    torch.testing.assert_close(joined.loss, whole.loss, **CLOSE)
    assert torch.equal(joined.correct, whole.correct)
    assert torch.equal(joined.labels, LABELS)
    # batches do not give the means of all images, which take a pass more
    assert joined.forward_equivalents == pytest.approx(whole.forward_equivalents + (by == "mean"))
    chosen = bench.without([(unit,) for unit in units], some)
    torch.testing.assert_close(chosen.loss, whole.loss[:, some], **CLOSE)
    assert torch.equal(chosen.labels, LABELS[some])


@pytest.mark.parametrize("by", REPLACEMENTS)
def test_units_given_before_are_removed_with_each(by: Replacement) -> None:
    bench = Bench(ours(depth=3), seen(), LABELS, by)
    heads = units_of(bench.model, kinds=("head",))
    given = (heads[3], heads[0])
    left = [head for head in heads if head not in given]
    found = bench.without([(head,) for head in left], given=given)
    together = bench.without([(*given, head) for head in left])
    torch.testing.assert_close(found.loss, together.loss, **CLOSE)


@pytest.mark.parametrize(
    ("count", "by", "words"), [(8, "mean", ""), (5, "resample", "another image's"), (1, "zero", "zero")]
)
def test_few_images_take_another_replacement_than_their_mean_and_say_so(count: int, by: str, words: str) -> None:
    model = ours()
    found, same = (ablate(model, seen(count), LABELS[:count], replace=each) for each in (None, by))
    assert found.replace == by
    assert words in found.note
    assert torch.equal(found.delta_loss, same.delta_loss)
    zero = ablate(model, seen(count), LABELS[:count], replace="zero")  # resampling takes the other images' pass
    assert found.forward_equivalents == pytest.approx(zero.forward_equivalents + (by == "resample"))


def test_a_loss_that_is_not_finite_names_unit_and_image() -> None:
    model = ours()
    with torch.no_grad():
        model.module.head.weight[:] = torch.inf
    with pytest.raises(NonFiniteError, match="finite logits of ours"):
        effects_of(Bench(model, seen(), LABELS), units_of(model))
    units = units_of(ours())
    bench = Bench(ours(), seen(), LABELS, "mean", batch_size=3).with_means(units)
    bench.means.sums["blocks.1.heads"][1] = torch.inf
    with pytest.raises(NonFiniteError, match="on image 3 without head/1/1"):
        bench.without([(Unit("head", 1, 1),)], torch.tensor([3]))
    with pytest.raises(NonFiniteError, match="on image 0 without head/1/1"):
        effects_of(bench, units)
    stored: list[tuple[Unit, ...]] = []

    def memory(*_: object) -> Callable[..., Any]:
        def remembered(sets: Any, measure: Callable[[], Any]) -> Any:
            found = measure()
            stored.extend(sets)
            return found

        return remembered

    with pytest.raises(NonFiniteError):
        effects_of(replace(bench, memory=memory), units)
    assert all(unit.layer == 0 for each in stored for unit in each)
    assert stored  # what is not finite is measured again by a resumed run


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("by", REPLACEMENTS)
def test_first_order_is_the_slope_towards_the_replacement(by: Replacement, size: int | None) -> None:
    model, pictures = ours(), seen()
    units = units_of(model)
    estimate = first_order(Bench(model, pictures, LABELS, by, seed=4, batch_size=size), units)
    assert estimate[4:].isnan().all()  # MLPs and blocks
    step = 1e-2
    for row, unit in enumerate(units[:4]):
        own = capture(model, pictures, unit.place)[unit.place]
        target = replaced(model, pictures, unit, by, seed=4)
        forth, back = (
            full_loss(model, pictures, LABELS, {unit.place: own + sign * step * (target - own)}) for sign in (1, -1)
        )
        torch.testing.assert_close(estimate[row], (forth - back) / (2 * step), atol=2e-4, rtol=0)
    assert estimate[:4].abs().max() > 1e-2


def test_first_order_in_windows_is_of_each_image() -> None:
    model, pictures = timm_model("swin_tiny_patch4_window7_224"), images(batch=8)
    units = units_of(model, kinds=("head",))
    whole = first_order(Bench(model, pictures, LABELS, "zero"), units)
    alone = first_order(Bench(model, pictures[3:4], LABELS[3:4], "zero"), units)
    torch.testing.assert_close(whole[:, 3:4], alone, **CLOSE)
    assert whole.isfinite().all()

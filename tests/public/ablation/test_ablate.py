"""`vitlens.ablate`: effects of removing units, against full forwards with the same change."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit.select import select, values_of
from tests.kit.sign_flips import bootstrap_t_test, sign_flip_test
from tests.kit.splits import split_of
from tests.kit.tiny import images, ours, timm_model
from vitlens import Model
from vitlens.errors import InputError, NonFiniteError, UnknownNameError
from vitlens.uncertainty import accuracy_difference, bootstrap_difference, holm

LABELS = torch.arange(8) % 5
EVERY = ("head", "mlp", "block")
SWIN = "swin_tiny_patch4_window7_224"


def seen(batch: int = 8) -> Tensor:
    return images((32, 48), batch=batch)


def full(model: Model, pictures: Tensor, changes: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return every image's loss, and True where it is correct, from one forward pass."""
    with vitlens.intervene(model, changes, seed=2) as changed, torch.no_grad():
        logits = changed(pictures)
    return F.cross_entropy(logits, LABELS, reduction="none").double(), logits.argmax(-1) == LABELS


@pytest.mark.parametrize(
    ("name", "by", "size", "groups"),
    [
        ("", "zero", 5, [0, 1, 2, 3, 4, 5, 6, 6]),
        ("", "mean", 3, None),
        ("deit3_small_patch16_224", "resample", 3, None),
        (SWIN, "mean", None, [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_effects_equal_full_forwards(
    name: str, by: str, size: int | None, groups: Sequence[int] | None
) -> None:
    model = timm_model(name) if name else ours()
    members = None if groups is None else torch.tensor(groups)
    split = split_of(images(model.input_size, batch=8), LABELS, model.classes, groups=members)
    pictures = vitlens.images(split, model)
    members_array = None if members is None else members.numpy()
    result = vitlens.ablate(model, split, replace=by, kinds=EVERY, batch_size=size, seed=2)
    assert (result.n, result.replace) == (8, by)
    clean, right = full(model, pictures, {})
    expected = float(clean.mean()), float(right.double().mean())
    assert (result.clean_loss, result.clean_accuracy) == pytest.approx(expected, abs=1e-6)
    for index, unit in enumerate(result.units):
        put: Any = "remove" if unit.kind == "block" else by
        if put == "mean":
            put = vitlens.capture(model, pictures, unit.place)[unit.place].mean(0)
        loss, correct = full(model, pictures, {unit.place: put})
        points = 100 * (right.double() - correct.double())
        lost = accuracy_difference(right.numpy(), correct.numpy(), groups=members_array, seed=2)
        risen = bootstrap_difference(loss.numpy(), clean.numpy(), groups=members_array, seed=2)
        pairs = ((result.loss, loss - clean, risen), (result.accuracy, points, lost))
        for metric, changes, alone in pairs:
            measured = tuple(
                map(float, (metric.mean[index], metric.low[index], metric.high[index]))
            )
            assert measured == pytest.approx((alone.value, alone.low, alone.high), abs=2e-5), unit
            differences = changes.numpy()
            p = sign_flip_test(differences, groups=members_array, seed=2)
            if index % 6 == 0 and differences.any():
                p = max(p, bootstrap_t_test(differences, groups=members_array, seed=2))
                assert float(metric.p[index]) == pytest.approx(p, abs=5e-3)
            assert float(metric.p[index]) >= p - 5e-3
    assert result.loss.mean.abs().max() > 1e-3
    for kind in EVERY:
        rows = result.of_kind(kind)
        for metric in (result.loss, result.accuracy):
            assert metric.p_holm[rows].tolist() == holm(metric.p[rows].tolist())
        means = result.loss.mean[rows]
        assert result.ranking(kind) == tuple(
            result.units[rows[at]] for at in means.argsort(descending=True).tolist()
        )


def test_tables_put_heads_where_they_are() -> None:
    swin = timm_model(SWIN)
    result = vitlens.ablate(swin, images(batch=8), LABELS, replace="zero", kinds=("head", "mlp"))
    assert values_of(result.units[:3], "place") == [
        "blocks.0.head.0",
        "blocks.0.head.1",
        "blocks.1.head.0",
    ]
    heads = values_of(select(result.units, kind="head"), "layer", "head")
    for table, values in (
        (result.delta_loss, result.loss.mean),
        (result.delta_accuracy, result.accuracy.mean),
        (result.low, result.loss.low),
        (result.high, result.loss.high),
    ):
        assert table.shape == (4, 4)
        assert [table[place].item() for place in heads] == values[: len(heads)].tolist()
        assert table.isnan().sum() == 16 - len(heads)  # the first stage has two heads a layer
    assert torch.equal(
        result.table(result.loss.mean, "mlp")[:, 0], result.loss.mean[result.of_kind("mlp")]
    )
    assert result.table(result.loss.mean, "block").isnan().all()
    alone = vitlens.ablate(swin, images(batch=8), LABELS, replace="zero", kinds="mlp")
    assert set(values_of(alone.units, "kind")) == {"mlp"}
    # its attention pooling is no block, but has heads
    pooled = timm_model("vit_base_patch16_siglip_224")
    units = vitlens.ablate(pooled, images(), LABELS[:2], replace="zero", kinds=EVERY).units
    assert values_of(select(units, kind="block"), "layer") == [0, 1]
    assert max(values_of(select(units, kind="head"), "layer")) == 2


def test_of_many_heads_one_can_matter() -> None:
    """Of 504 the smallest p-value of 10,000 draws would be 0.0504 after Holm's correction."""
    model = ours(dim=504, heads=504, depth=1, patch_size=(16, 48), mlp=False)
    result = vitlens.ablate(model, seen(20), torch.zeros(20, dtype=torch.int64), replace="zero")
    assert (len(result.units), result.is_ranked("head")) == (504, True)


def certain_vit(scale: float) -> Model:
    """Return a model that predicts its labels with log-odds `scale` times those of `ours`."""
    model = ours()
    with torch.no_grad():
        model.module.head.weight.mul_(scale)
        model.module.head.bias.mul_(scale)
    return model


def test_the_loss_of_a_certain_model_is_not_rounded_to_zero() -> None:
    model = certain_vit(80.0)
    labels = model(seen()).argmax(1)
    with torch.no_grad():
        logits = model(seen()).double()
    assert (
        F.cross_entropy(logits.float(), labels, reduction="none") == 0
    ).any()  # in single precision
    result = vitlens.ablate(model, seen(), labels, replace="zero")
    logsumexp_of_others = logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    expected = (logsumexp_of_others - logits.gather(1, labels[:, None])[:, 0]).exp().log1p()
    assert result.clean_loss == pytest.approx(float(expected.mean()), rel=1e-4)
    one = vitlens.ablate(model, seen()[:1], labels[:1], replace="zero")
    assert one.clean_loss == pytest.approx(float(expected[0]), rel=1e-3, abs=0)


def test_forward_passes_are_counted() -> None:
    """Batches do not give the means of all images, and resampling takes the other images' pass: one
    pass more.
    """
    spent = {
        (by, size): vitlens.ablate(
            ours(), seen(), LABELS, replace=by, batch_size=size
        ).forward_equivalents
        for by in ("zero", "mean", "resample")
        for size in (8, 3)
    }
    for (by, size), passes in spent.items():
        assert passes == pytest.approx(
            spent["zero", 8] + (by == "resample") + (by == "mean" and size == 3)
        )
    deep = vitlens.ablate(ours(depth=6), seen(), LABELS, replace="zero")
    assert 1 < deep.forward_equivalents < 1 + 0.6 * len(deep.units)  # replays cost less


@pytest.mark.parametrize(("count", "by"), [(8, "mean"), (5, "resample"), (1, "zero")])
def test_few_images_take_another_replacement_than_their_mean_and_say_so(
    count: int, by: str
) -> None:
    result = vitlens.ablate(ours(), seen(count), LABELS[:count], replace=None)
    same = vitlens.ablate(ours(), seen(count), LABELS[:count], replace=by)
    assert (result.replace, bool(result.note)) == (by, count < 8)
    assert torch.equal(result.delta_loss, same.delta_loss)
    # no interval and no test of one
    assert result.low.isnan().all() == result.loss.p.isnan().all() == (count == 1)
    assert result.is_ranked("head") == bool(result.matters.any())


def test_what_cannot_be_said_is_noted() -> None:
    right = ours()(seen(9)).argmax(1)
    never = vitlens.ablate(ours(), seen(9), (right + 1) % 5, replace="zero")
    assert (never.clean_accuracy, bool(never.note)) == (0, True)
    same = vitlens.ablate(ours(), seen(9), right, replace="zero")
    predicted = vitlens.ablate(ours(), seen(9), "predicted", replace="zero")
    assert (predicted.clean_accuracy, predicted.note) == (1, "")
    assert torch.equal(predicted.delta_loss, same.delta_loss)
    one_group = split_of(seen(9), right, ours().classes, groups=torch.zeros(9, dtype=torch.int64))
    result = vitlens.ablate(ours(), one_group, replace="zero")
    assert result.loss.mean.isfinite().all()
    for name in ("low", "high", "p", "p_holm"):
        assert getattr(result.loss, name).isnan().all()
    assert (bool(result.matters.any()), bool(result.note)) == (False, True)


def test_what_cannot_be_measured_is_refused() -> None:
    """A CNN, an unknown replacement, too few for a mean: tests/public/cli, tests/contracts."""
    unchecked: Any = getattr(vitlens.ablate, "__wrapped__", vitlens.ablate)
    with pytest.raises(UnknownNameError):
        unchecked(ours(), seen(), LABELS, kinds=("mlp", "heads"))
    with pytest.raises(InputError):
        unchecked(ours(), seen(1), torch.tensor([7]))
    with pytest.raises(InputError):
        unchecked(ours(), seen(1), LABELS[:1], replace="resample")


def test_a_loss_that_is_not_finite_names_unit_and_image() -> None:
    model = ours()
    with torch.no_grad():
        model.module.head.weight[:] = torch.inf
    with pytest.raises(NonFiniteError):
        vitlens.ablate(model, seen(), LABELS)
    model = ours()
    batch = seen()
    seen_by_head = list[Tensor]()
    hook = model.module.head.register_forward_pre_hook(
        lambda _module, inputs: seen_by_head.append(inputs[0])
    )
    full(model, batch, {"blocks.1.head.1": "zero"})
    hook.remove()
    third = seen_by_head[-1][3]  # what the classifier reads of image 3 without that head

    def broken(_module: object, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        return torch.where(
            (inputs[0] - third).abs().amax(-1, keepdim=True) < 1e-4, torch.inf, logits
        )

    model.module.head.register_forward_hook(broken)
    for size in (8, 2):
        with pytest.raises(NonFiniteError, match="image 3 without head/1/1"):
            vitlens.ablate(model, batch, LABELS, replace="zero", batch_size=size)


def test_too_few_images_for_the_correction_are_noted() -> None:
    """Of n differences the least p of sign flips is 2 / 2^n: of 4 heads none passes Holm's below 8
    images.
    """
    model = ours()
    pictures = seen(20)
    labels = model(pictures).argmax(1)

    def note(count: int) -> str:
        return vitlens.ablate(model, pictures[:count], labels[:count], replace="zero").note

    assert len(vitlens.ablate(model, pictures, labels, replace="zero").units) == 4
    assert [bool(note(count)) for count in (2, 7, 8, 20)] == [True, True, False, False]
    grouped = split_of(pictures, labels, model.classes, groups=torch.arange(20) // 4)
    assert vitlens.ablate(model, grouped, replace="zero").note  # five groups


def test_log_odds_too_large_for_a_loss_in_double_precision_are_not_lost() -> None:
    """From log-odds of 745 on the loss is 0."""
    labels = ours()(seen()).argmax(1)
    some = vitlens.ablate(certain_vit(80.0), seen(), labels, replace="zero")
    many = vitlens.ablate(certain_vit(80_000.0), seen(), labels, replace="zero")
    assert many.clean_loss == 0
    assert some.log_odds is not None
    assert many.log_odds is not None
    assert many.log_odds.mean.tolist() == pytest.approx(
        (1000 * some.log_odds.mean).tolist(), rel=0.05
    )


def test_heads_of_a_certain_model_are_ranked_by_log_odds() -> None:
    plain = ours()
    certain = certain_vit(80.0)
    labels = plain(seen(20)).argmax(1)
    first = vitlens.ablate(plain, seen(20), labels, replace="zero")
    second = vitlens.ablate(certain, seen(20), labels, replace="zero")
    assert first.log_odds is None
    assert first.ranking() == tuple(
        first.units[at] for at in first.loss.mean.argsort(descending=True).tolist()
    )
    assert second.clean_loss < 0.05
    assert second.log_odds is not None
    order = second.log_odds.mean.argsort(descending=True).tolist()
    assert second.ranking() == tuple(second.units[at] for at in order)
    assert second.note

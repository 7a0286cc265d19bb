"""The record of cost holds what the functions count, for any model without weights; no time is asserted."""

import pytest

from tests.kit.commands import few_passes, figures, ran, report, said_first
from vitlens import load, profile


@pytest.fixture(autouse=True)
def _few_passes():
    with few_passes():
        yield


def test_numbers_are_those_of_the_functions(golden, tiny_vit, tiny_cnn):
    record = golden("profile").record
    vit, cnn = record.costs
    for row, place in ((vit, tiny_vit), (cnn, tiny_cnn)):
        model = load(str(place))
        again = profile(model, batch_sizes=())
        assert record.metric(f"parameters/{row.model}").value == model.parameter_count()
        parts = [each for each in record.parts if each.model == row.model]
        for name in ("parameters", "flops"):
            known = {part: value for part, value in getattr(again, name).items() if value}
            assert {each.part: getattr(each, name) for each in parts if getattr(each, name)} == known
        metric = record.metric(f"flops/{row.model}")
        assert (metric.value, metric.unit) == (sum(again.flops.values()), "FLOPs")
        for name in ("by_formula", "tokens", "training_bytes", "inference_bytes"):
            assert getattr(row, name) == getattr(again, name)
        assert [each.images for each in record.speed if each.model == row.model] == [1, 2]
    assert (vit.products, vit.untrained) == (2 * 4 * 17**2 * 16, False)  # 4 N² d in each of two blocks
    assert (vit.by_formula, cnn.by_formula) == (True, False)


def test_medians_spreads_and_rates_agree(golden):
    for row in golden("profile").record.speed:
        assert row.latency.low <= row.latency.value <= row.latency.high
        assert row.latency.unit == "ms"
        assert row.spread >= 1
        assert row.rate.value == pytest.approx(1000 * row.images / row.latency.value)
        assert row.rate.low == pytest.approx(1000 * row.images / row.latency.high)


def test_exponents_are_those_of_the_points(tmp_path):
    """That of all FLOPs of a ViT: tests/public/cost."""
    record = ran(tmp_path / "out", "profile vit-micro resnet20 swin-micro --batch-sizes 1 --sizes 32,64,96")
    points = [row for row in record.tokens if row.model == "vit-micro"]
    assert [row.tokens for row in points] == [65, 257, 577]
    assert record.metric("exponent/resnet20/image-size/flops").value == pytest.approx(1, abs=1e-3)
    assert "exponent/resnet20/image-size/products" not in record.metrics
    for model, power in (("vit-micro", 2.0), ("swin-micro", 1.0)):  # exact, with intervals without width
        each = record.metric(f"exponent/{model}/image-size/products")
        assert (each.value, each.low, each.high) == pytest.approx((power,) * 3, abs=1e-6)
    [claim] = [each for each in report(record).claims if each.subject == "vit-micro and swin-micro"
               and "products" in each.question]  # fmt: skip
    assert claim.effect == record.metric("exponent/vit-micro/image-size/products")
    vit = record.costs[0]
    assert (vit.untrained, vit.crossover) == (True, pytest.approx(768))  # 2 d + h
    assert record.metric("parameters/vit-micro").value == 1_205_898


def test_patch_sizes_of_a_preset_stand_side_by_side(tmp_path):
    record = ran(tmp_path / "out", "profile vit-mini resnet20 --patch-size 4,8,8x16 --batch-sizes 1")
    assert [(row.model, row.tokens) for row in record.costs] == [
        ("vit-mini-p4", 65), ("vit-mini-p8", 17), ("vit-mini-p8x16", 9), ("resnet20", 1024)
    ]  # fmt: skip
    assert all(row.untrained for row in record.costs)
    sweeps = {(row.model, row.sweep) for row in record.tokens}
    assert sweeps == {("vit-mini", "patch-size"), ("resnet20", "image-size")}
    assert record.metric("exponent/vit-mini/patch-size/products").value == pytest.approx(2)
    assert "growth_patch-size" in figures(record)


def test_a_default_size_that_does_not_run_is_left_out_and_said(tmp_path):
    record = ran(tmp_path / "out", "profile torchvision:squeezenet1_1 --image-size 32 --batch-sizes 1")
    (left,) = record.left_out
    assert (left.size, left.sweep) == ((16, 16), "image-size")
    assert [row.size for row in record.tokens] == [(side, side) for side in (24, 32, 48, 64)]
    assert "16x16" in said_first(report(record))

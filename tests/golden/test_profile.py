"""The record of cost holds what the functions count, for any model without weights; no time is asserted."""

import numpy as np
import pytest

from tests.kit.commands import few_passes, figures, ran, report, said_first
from vitlens import load, profile


@pytest.fixture(autouse=True)
def _few_passes():
    with few_passes():
        yield


def flops_of_a_vit(*, dim: int, depth: int, patches: int, patch: int, classes: int, ratio: int = 4) -> dict[str, int]:
    """Two for each multiplication with a weight, or of two activations, counted by hand."""
    tokens = patches + 1
    return {
        "products": depth * 2 * 2 * tokens * tokens * dim,
        "all": 2 * patches * 3 * patch * patch * dim + 2 * dim * classes
        + depth * (2 * tokens * dim * dim * (4 + 2 * ratio) + 2 * 2 * tokens * tokens * dim),
    }  # fmt: skip


def test_numbers_are_those_of_the_functions(golden, tiny_vit, tiny_cnn):
    record = golden("profile").record
    vit, cnn = record.costs
    for row, place in ((vit, tiny_vit), (cnn, tiny_cnn)):
        model = load(str(place))
        again = profile(model, batch_sizes=())
        assert record.metric(f"parameters/{row.model}").value == model.parameter_count()
        parts = [each for each in record.parts if each.model == row.model]
        assert sum(each.parameters for each in parts) == model.parameter_count()
        assert sum(each.flops for each in parts) == record.metric(f"flops/{row.model}").value
        assert (row.training_bytes, row.inference_bytes) == (again.training_bytes, again.inference_bytes)
        assert [each.images for each in record.speed if each.model == row.model] == [1, 2]
    counted = flops_of_a_vit(dim=16, depth=2, patches=16, patch=8, classes=10)
    metric = record.metric("flops/tiny-vit")
    assert (metric.value, metric.unit) == (pytest.approx(counted["all"], rel=0.1), "FLOPs")
    assert (vit.products, vit.by_formula, vit.tokens, vit.untrained) == (counted["products"], True, 17, False)
    assert (cnn.by_formula, cnn.tokens) == (False, 1024)


def test_medians_spreads_and_rates_agree(golden):
    for row in golden("profile").record.speed:
        assert row.latency.low <= row.latency.value <= row.latency.high
        assert row.latency.unit == "ms"
        assert row.spread == pytest.approx(row.latency.high / row.latency.low, rel=1e-3) or row.spread >= 1
        assert row.rate.value == pytest.approx(1000 * row.images / row.latency.value)
        assert row.rate.low == pytest.approx(1000 * row.images / row.latency.high)


def test_exponents_are_those_of_the_points(tmp_path):
    record = ran(tmp_path / "out", "profile vit-micro resnet20 swin-micro --batch-sizes 1 --sizes 32,64,96")
    points = [row for row in record.tokens if row.model == "vit-micro"]
    assert [row.tokens for row in points] == [65, 257, 577]
    slope, _ = np.polyfit(np.log([65, 257, 577]), np.log([row.flops for row in points]), 1)
    assert record.metric("exponent/vit-micro/image-size/flops").value == pytest.approx(slope)
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

"""The record of cost holds what the functions count, for any model without weights; no time is asserted."""

import numpy as np
import pytest

from vitlens import load, profile
from vitlens.analysis.cost import passes as module
from vitlens.analysis.cost.flops import PRODUCTS, parameters_by_part, vit_flops
from vitlens.cli.main import run as command_line
from vitlens.commands.profile.measure import speed_row
from vitlens.commands.profile.record import ProfileRecord
from vitlens.commands.profile.report import REPORT
from vitlens.commands.run.publish import read_folder
from vitlens.models.configs import VIT_PRESETS


@pytest.fixture(autouse=True)
def few_passes(monkeypatch):
    """Two passes a round: no test asks how long they take."""
    monkeypatch.setattr(module, "_ROUND", 0.0)


def run(typed: str, out) -> ProfileRecord:
    given = "" if "--batch-sizes" in typed else "--batch-sizes 1"
    sizes = "" if "--sizes" in typed or "--patch-size" in typed or "squeeze" in typed else "--sizes 16,32"
    line = f"profile {typed} {given} {sizes} --device cpu --quiet --out {out}"
    assert command_line(line.split()) == 0
    assert (out / "report.md").is_file()
    return read_folder(out)


def test_numbers_are_those_of_the_functions(tmp_path):
    record = run("vit-micro resnet20 --batch-sizes 1,2", tmp_path / "out")
    flops = vit_flops(VIT_PRESETS["vit-micro"])
    assert record.metric("parameters/vit-micro").value == 1_205_898
    counted = record.metric("flops/vit-micro")
    assert (counted.value, counted.unit) == (sum(flops.values()), "FLOPs")
    parts = [row for row in record.parts if row.model == "vit-micro"]
    assert {row.part: row.flops for row in parts if row.flops} == flops
    expected = parameters_by_part(load("vit-micro", random_weights=True))
    assert {row.part: row.parameters for row in parts if row.parameters} == expected
    assert [(row.model, row.images) for row in record.speed] == [
        ("vit-micro", 1), ("vit-micro", 2), ("resnet20", 1), ("resnet20", 2)
    ]  # fmt: skip
    vit, cnn = record.costs
    assert (vit.untrained, vit.by_formula, vit.tokens) == (True, True, 65)
    assert (cnn.untrained, cnn.by_formula, cnn.tokens) == (True, False, 1024)
    assert (vit.products, vit.crossover) == (flops[PRODUCTS], pytest.approx(768))  # 2 d + h
    again = profile(load("vit-micro", random_weights=True), batch_sizes=())
    assert (vit.training_bytes, vit.inference_bytes) == (again.training_bytes, again.inference_bytes)


def test_medians_spreads_and_rates_are_those_of_the_passes():
    seconds = (0.010, 0.011, 0.012, 0.013, 0.014, 0.030, 0.040)
    row = speed_row("m", module.TimedBatch(module.quartiles(seconds, 3), seconds, None))
    low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    assert (row.latency.value, row.latency.n, row.latency.unit) == (pytest.approx(1000 * median), 7, "ms")
    assert row.spread == pytest.approx(high / low)
    assert row.rate.value == pytest.approx(3 / median)
    assert (row.rate.low, row.rate.high) == pytest.approx((3000 / row.latency.high, 3000 / row.latency.low))


def test_exponents_are_those_of_the_points(tmp_path):
    record = run("vit-micro resnet20 swin-micro --sizes 32,64,96", tmp_path / "out")
    points = [row for row in record.tokens if row.model == "vit-micro"]
    assert [row.tokens for row in points] == [65, 257, 577]
    slope, _ = np.polyfit(np.log([65, 257, 577]), np.log([row.flops for row in points]), 1)
    assert record.metric("exponent/vit-micro/image-size/flops").value == pytest.approx(slope)
    assert record.metric("exponent/resnet20/image-size/flops").value == pytest.approx(1, abs=1e-3)
    assert "exponent/resnet20/image-size/products" not in record.metrics
    for model, power in (("vit-micro", 2.0), ("swin-micro", 1.0)):  # exact, with intervals without width
        each = record.metric(f"exponent/{model}/image-size/products")
        assert (each.value, each.low, each.high) == pytest.approx((power,) * 3, abs=1e-6)
    [claim] = [each for each in REPORT(record).claims if each.subject == "vit-micro and swin-micro"
               and "products" in each.question]  # fmt: skip
    assert claim.effect == record.metric("exponent/vit-micro/image-size/products")


def test_patch_sizes_of_a_preset_stand_side_by_side(tmp_path):
    record = run("vit-mini resnet20 --patch-size 4,8,8x16", tmp_path / "out")
    assert [(row.model, row.tokens) for row in record.costs] == [
        ("vit-mini-p4", 65), ("vit-mini-p8", 17), ("vit-mini-p8x16", 9), ("resnet20", 1024)
    ]  # fmt: skip
    assert all(row.untrained for row in record.costs)
    sweeps = {(row.model, row.sweep) for row in record.tokens}
    assert sweeps == {("vit-mini", "patch-size"), ("resnet20", "image-size")}
    assert record.metric("exponent/vit-mini/patch-size/products").value == pytest.approx(2)
    assert (tmp_path / "out" / "figures" / "growth_patch-size.png").is_file()


def test_a_default_size_that_does_not_run_is_left_out_and_said(tmp_path, capsys):
    record = run("torchvision:squeezenet1_1 --image-size 32", tmp_path / "out")
    (left,) = record.left_out
    assert (left.size, left.sweep) == ((16, 16), "image-size")
    assert [row.size for row in record.tokens] == [(side, side) for side in (24, 32, 48, 64)]
    assert any("16x16" in each.text for each in REPORT(record).first.unknown)
    line = f"profile torchvision:squeezenet1_1 --image-size 32 --sizes 16 --out {tmp_path / 'again'}"
    assert command_line(line.split()) == 2
    assert "to run at 16x16 px" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("vit-tny", "did you mean"),
        ("resnet20 --patch-size 8", "expected a preset of a ViT with --patch-size"),
        ("vit-mini --patch-size 5", "divisible by the patch's"),
        ("vit-mini --sizes 32,30", "divisible by the patch's"),
        ("vit-mini --limit 3", "expected no --limit"),
    ],
)
def test_refusals_write_nothing(typed, said, tmp_path, capsys):
    assert command_line(["profile", *typed.split(), "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""The record of cost holds what the functions count, for any model without weights; no time is asserted."""

from pathlib import Path

import numpy as np
import pytest

from tests.lens.tiny import FAMILIES
from vitlens.analysis.cost import latency
from vitlens.analysis.cost.flops import vit_flops
from vitlens.analysis.cost.parts import PRODUCTS, parameters_by_part
from vitlens.commands.profile.conclusions import findings
from vitlens.commands.profile.measure import measure
from vitlens.commands.profile.measure.models import default_sizes
from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.profile.record import (
    COSTS,
    EXPONENT,
    EXPONENTS,
    FLOPS,
    LATENCY,
    LEFT_OUT,
    PARAMETERS,
    PARTS,
    SECONDS,
    SPEED,
    THROUGHPUT,
    TOKENS,
)
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.publish import read
from vitlens.errors import InputError, ModelError, UnknownNameError
from vitlens.files import read_run
from vitlens.models.loading import load
from vitlens.models.vit_config import VIT_PRESETS
from vitlens.records import Record


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes a round: no test asks how long they take."""
    monkeypatch.setattr(latency, "_ROUND", 0.0)


def run(models: list[str], out: Path, **changes: object) -> Record:
    told = {"batch_sizes": (1,), "sizes": ((16, 16), (32, 32)), **changes}
    options = ProfileOptions(tuple(models), run=RunOptions(device="cpu", quiet=True, out=out), **told)
    assert measure(options) == out / "report.md"
    return read(read_run(out))


def test_numbers_are_those_of_the_functions(tmp_path):
    record = run(["vit-micro", "resnet20"], tmp_path / "out", batch_sizes=(1, 2))
    assert record.metric(PARAMETERS(model="vit-micro")).value == 1_205_898
    flops = vit_flops(VIT_PRESETS["vit-micro"])
    counted = record.metric(FLOPS(model="vit-micro"))
    assert (counted.value, counted.unit) == (sum(flops.values()), "FLOPs")
    parts = {row.part: row for row in record.rows(PARTS) if row.model == "vit-micro"}
    assert {name: row.flops for name, row in parts.items() if row.flops} == flops
    expected = parameters_by_part(load("vit-micro", random_weights=True))
    assert {name: row.parameters for name, row in parts.items() if row.parameters} == expected
    assert [(row.model, row.images) for row in record.rows(SPEED)] == [
        ("vit-micro", 1), ("vit-micro", 2), ("resnet20", 1), ("resnet20", 2)
    ]  # fmt: skip
    vit, cnn = record.rows(COSTS)
    assert (vit.untrained, vit.by_formula, vit.tokens) == (True, True, 65)
    assert (cnn.untrained, cnn.by_formula, cnn.tokens) == (True, False, 1024)


def test_medians_quartiles_and_rates_agree_with_the_passes(tmp_path):
    record = run(["vit-micro"], tmp_path / "out", batch_sizes=(3,))
    seconds = record.arrays(SECONDS, model="vit-micro").batch[3]
    (row,) = record.rows(SPEED)
    assert [row.low, row.median, row.high] == pytest.approx(np.quantile(seconds, (0.25, 0.5, 0.75)))
    time, rate = (record.metric(metric(model="vit-micro", batch=3)) for metric in (LATENCY, THROUGHPUT))
    assert time.value == pytest.approx(1000 * np.median(seconds))
    assert time.n == len(seconds) == 6
    assert rate.value == pytest.approx(3000 / time.value)
    assert rate.low == pytest.approx(3000 / time.high)


def test_exponents_are_those_of_the_points(tmp_path):
    record = run(["vit-micro", "resnet20"], tmp_path / "out", sizes=((16, 16), (32, 32), (64, 64)))
    points = [row for row in record.rows(TOKENS) if row.model == "vit-micro"]
    assert [row.tokens for row in points] == [17, 65, 257]
    slope, _ = np.polyfit(np.log([17, 65, 257]), np.log([row.flops for row in points]), 1)

    def exponent(model: str, cost: str) -> float:
        return record.metric(EXPONENT(model=model, sweep="image-size", cost=cost)).value

    assert exponent("vit-micro", "flops") == pytest.approx(slope)
    assert exponent("vit-micro", "products") == pytest.approx(2)
    assert exponent("resnet20", "flops") == pytest.approx(1, abs=1e-3)
    assert EXPONENT(model="resnet20", sweep="image-size", cost="products") not in record.metrics


def test_patch_sizes_of_a_preset_stand_side_by_side(tmp_path):
    record = run(["vit-mini", "resnet20"], tmp_path / "out", patch_sizes=((4, 4), (8, 8), (8, 16)), sizes=())
    rows = record.rows(COSTS)
    assert [(row.model, row.tokens) for row in rows] == [
        ("vit-mini-p4", 65), ("vit-mini-p8", 17), ("vit-mini-p8x16", 9), ("resnet20", 1024)
    ]  # fmt: skip
    assert all(row.untrained for row in rows)
    sweeps = {(row.model, row.sweep) for row in record.rows(TOKENS)}
    assert sweeps == {("vit-mini", "patch size"), ("resnet20", "image size")}
    assert record.metric(EXPONENT(model="vit-mini", sweep="patch-size", cost="products")).value == pytest.approx(2)
    assert (tmp_path / "out" / "figures" / "growth_patches.png").is_file()


def test_a_trained_model_is_taken_as_it_is(tiny_vit, tmp_path):
    record = run([f"mine={tiny_vit}", f"fresh={tiny_vit}@random"], tmp_path / "out")
    assert [row.untrained for row in record.rows(COSTS)] == [False, True]


def test_a_default_size_that_does_not_run_is_left_out_and_said(tmp_path):
    small = ModelOptions(image_size=(32, 32))
    record = run(["torchvision:squeezenet1_1"], tmp_path / "out", sizes=(), model_options=small)
    (left,) = record.rows(LEFT_OUT)
    assert (left.size, left.sweep) == ((16, 16), "image size")
    assert [row.size for row in record.rows(TOKENS)] == [(side, side) for side in (24, 32, 48, 64)]
    with pytest.raises(ModelError, match="to run at 16x16 px"):
        run(["torchvision:squeezenet1_1"], tmp_path / "again", sizes=((16, 16),))


def test_default_sizes_are_whole_patches():
    assert default_sizes(load("vit-tiny-224", random_weights=True)) == [
        (side, side) for side in (112, 160, 224, 336, 448)
    ]
    assert default_sizes(load("resnet20", random_weights=True)) == [(side, side) for side in (16, 24, 32, 48, 64)]
    windowed = FAMILIES["swin"]()
    assert default_sizes(windowed) == [(side, side) for side in (16, 24, 32, 48, 64)]


def test_refusals_write_nothing(tmp_path):
    for error, models, changes, said in (
        (UnknownNameError, ["vit-tny"], {}, "did you mean"),
        (InputError, ["resnet20"], {"patch_sizes": ((8, 8),)}, "expected a preset of a ViT with --patch-size"),
        (InputError, ["vit-mini"], {"patch_sizes": ((5, 5),)}, "divisible by the patch's"),
        (InputError, ["vit-mini"], {"sizes": ((32, 32), (30, 30))}, "divisible by the patch's"),
    ):
        with pytest.raises(error, match=said):
            run(models, tmp_path / "out", **changes)
        assert not (tmp_path / "out").exists()


def test_the_crossover_of_attention_products_is_kept(tmp_path):
    (row,) = run(["vit-micro"], tmp_path / "out").rows(COSTS)
    assert row.products == vit_flops(VIT_PRESETS["vit-micro"])[PRODUCTS]
    assert row.crossover == pytest.approx(768)  # 2 d + h
    assert row.by_formula


def test_a_vit_beside_a_swin_over_the_image_size(tmp_path):
    """The products' exponents: 2 and 1, with intervals without width, and the finding that says so."""
    record = run(["vit-micro", "swin-micro"], tmp_path / "out", sizes=((32, 32), (64, 64), (96, 96)))
    rows = {row.model: row for row in record.rows(EXPONENTS) if row.cost == "products"}
    for model, power in (("vit-micro", 2.0), ("swin-micro", 1.0)):
        assert (rows[model].value, rows[model].low, rows[model].high) == pytest.approx((power,) * 3, abs=1e-6)
    found = [each for each in findings(record) if each is not None and each.claim.rows == tuple(rows.values())]
    assert len(found) == 1
    assert found[0].effect == rows["vit-micro"].estimate

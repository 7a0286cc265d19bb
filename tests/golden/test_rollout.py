"""`vitlens rollout`: its numbers are those of the functions, and its report claims no more than they show."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import vitlens
from tests.kit.contradictions import contradictions
from tests.kit.making import digits, save
from tests.kit.simulated_processes import run_in_processes
from vitlens import load
from vitlens import rollout as rollout_maps
from vitlens.analysis.attention.map_checks import map_bits
from vitlens.analysis.attention.methods import maps_in_one_pass
from vitlens.analysis.attention.registry import MethodSettings
from vitlens.analysis.faithfulness.localisation import pointing_hits
from vitlens.cli.main import run as main
from vitlens.commands.rollout.measure import measure
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.rollout.record import ImageRow, PairRow, RolloutRecord, RolloutRow
from vitlens.commands.rollout.report import REPORT
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.shared.maps.measure import on_object_rows
from vitlens.errors import InputError, UnsupportedError
from vitlens.record import Config, Data, ModelEntry
from vitlens.uncertainty import Estimate, Side

OPTIONS = RunOptions(device="cpu", limit=12, batch_size=5, quiet=True)


def run(model: Path | str, out: Path, **changes: object) -> RolloutRecord:
    assert measure(RolloutOptions(str(model), run=replace(OPTIONS, out=out), **changes)) == out / "report.md"
    return read_folder(out)


def test_numbers_are_those_of_the_functions(tiny_vit, golden):
    record = golden("rollout").record
    split, model = digits("test").limit(12), load(str(tiny_vit))
    found = {
        fusion: torch.cat([rollout_maps(model, batch.images, fusion=fusion) for batch in split.batches(7)])
        for fusion in ("max", "min")
    }
    hits = pointing_hits(found["max"], split.masks)
    metric = record.metric("localisation/tiny-vit/pointing/rollout-max")
    assert (metric.value, metric.n) == (pytest.approx(hits.float().mean().item()), 12)
    row = record.methods[0]
    assert (row.pointing, row.name) == (metric, "rollout (max)")
    assert row.difference.value == pytest.approx(100 * (row.pointing.value - row.of_baseline.value))
    assert row.of_baseline.value >= split.masks.float().mean().item() - 1e-6  # of a uniform map, one of them
    assert row.information.value == pytest.approx(map_bits(found["max"]).mean().item(), rel=1e-5)
    mass = found["max"].flatten(1).sum(1).mean().item()
    assert record.metric("rollout/tiny-vit/patch_mass/max").value == pytest.approx(mass, rel=1e-5)
    (pair,) = record.pairs
    ranked = [stats.spearmanr(*map(torch.flatten, both)).statistic for both in zip(found["max"], found["min"])]
    assert pair.agreement.value == pytest.approx(sum(ranked) / len(ranked), rel=1e-5)
    torch.testing.assert_close(torch.from_numpy(record.maps.maps[:, 0]), found["max"], atol=1e-6, rtol=0)
    assert record.maps.hits[:, 0].tolist() == (hits > 0.5).tolist()


def test_every_method_is_the_function_of_its_name(tiny_vit, tmp_path):
    methods = ("rollout", "relevance", "gradient-rollout", "attention", "flow")
    record = run(tiny_vit, tmp_path / "out", data="digits", fusion=("min",), method=methods, target="true")
    split, model = digits("test").limit(12), load(str(tiny_vit))
    ways = [MethodSettings(name, "min" if name == "rollout" else "mean") for name in methods]
    (found,) = [maps_in_one_pass(model, batch.images, ways, targets=batch.labels)[1] for batch in split.batches(12)]
    for index, maps in enumerate(found):
        torch.testing.assert_close(torch.from_numpy(record.maps.maps[:, index]), maps.float(), atol=1e-6, rtol=1e-4)
    assert [row.maps for row in record.methods] == ["rollout-min", *methods[1:]]
    assert [row.target for row in record.shown] == [str(int(label)) for label in split.labels]


def test_two_processes_find_what_one_finds(tiny_vit, tmp_path, monkeypatch):
    one = run(tiny_vit, tmp_path / "one", data="digits", target="true")
    out = tmp_path / "two"
    options = RolloutOptions(str(tiny_vit), data="digits", target="true", run=replace(OPTIONS, out=out))
    assert run_in_processes(2, lambda _: measure(options), monkeypatch) == [out / "report.md", None]
    two = read_folder(out)
    assert two.methods == one.methods
    assert two.shown == one.shown
    np.testing.assert_allclose(two.maps.maps, one.maps.maps, atol=1e-6)


def test_a_cnn_is_refused(tiny_cnn, pictures, tmp_path):
    with pytest.raises(UnsupportedError):
        run(tiny_cnn, tmp_path / "out", images=(str(pictures),))


def test_own_images_are_shown_and_have_no_pointing_game(tiny_vit, pictures, tmp_path, monkeypatch, capsys):
    line = ["rollout", str(tiny_vit), "--device", "cpu", "--images", str(pictures)]
    broken = tmp_path / "broken.jpg"
    broken.write_text("no image")
    monkeypatch.setattr("vitlens.commands.rollout.report.EACH", 1)
    assert main([*line, str(broken), "--out", str(tmp_path / "all")]) == 0
    assert "of the 3 images" not in capsys.readouterr().err
    found = vitlens.read(tmp_path / "all")
    assert not [name for name in found.metrics if name.startswith("localisation")]
    assert [Path(row.image).name for row in found.table("shown")] == ["0.png", "1.png", "2.png"]
    usual = ["rollout-mean", "rollout-max", "rollout-min", "relevance"]
    assert [row.maps for row in found.table("methods")] == usual  # none was asked for
    assert "broken.jpg" in found.config.data.skipped[0].file
    drawn = {path.stem for path in (tmp_path / "all" / "figures").glob("*.png")}
    assert drawn == {"maps", "maps_more_1", "maps_more_2"}
    monkeypatch.setattr("vitlens.commands.rollout.measure.DRAWN", 1)
    assert main([*line, "--out", str(tmp_path / "one")]) == 0
    assert "1 of the 3 images" in capsys.readouterr().err


def test_maps_that_are_zero_everywhere_are_said(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.zero_()  # no weight of attention changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    record = run(tmp_path / "blind", tmp_path / "out", data="digits", fusion=("mean",))
    assert {row.name: row.zero for row in record.methods} == {"rollout (mean)": 0, "relevance": 12}
    area = digits("test").limit(12).masks.float().mean().item()
    hits = record.metric("localisation/blind/pointing/relevance").value
    assert hits == pytest.approx(area, abs=1e-6)  # all points tie: no better than a random one
    (said,) = REPORT(record).first.answer
    assert "12 of 12 maps of **relevance** are zero" in said.text
    (figure,) = [each for each in REPORT(record).figures if each.name == "maps"]
    panels = figure.draw().axes
    assert not any(line.get_marker() in ("o", "X") for axes in panels[2::3] for line in axes.lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "10"}, "from 0 to 9, found 10"),
        ({"target": "cat"}, "no class 'cat'"),
        ({"target": "true"}, "labelled images"),
        ({"discard": 1.0}, "discard"),
        ({"start_layer": 2}, "layer"),
        ({"method": ("attention",), "layer": 2}, "layer"),
        ({"data": "digits"}, "--images or --data"),
    ],
)
def test_what_cannot_be_is_refused(tiny_vit, pictures, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        run(tiny_vit, tmp_path / "out", images=(str(pictures),), **changes)
    assert not (tmp_path / "out" / "report.md").exists()


def planted(images: int = 40, **changes: object) -> RolloutRecord:
    """Two fusions and relevance, of which relevance alone finds the object; changes: of the mean fusion's row."""

    def row(name: str, method: str, fusion: str | None, gain: float) -> RolloutRow:
        return RolloutRow(
            model="vit", maps=name, name=name, method=method, zero=0, fusion=fusion,
            information=Estimate(2.0, 1.8, 2.2, images, "bits"),
            by_place=Estimate(0.3, 0.2, 0.4, images), pointing=Estimate(0.5 + gain / 100, 0.4, 0.6, images),
            baseline="a map of the centre", of_baseline=Estimate(0.5),
            difference=Estimate(gain, gain - 10, gain + 10, images, "points"),
        )  # fmt: skip

    rows = (
        replace(row("mean-map", "rollout", "mean", 0.0), **changes),
        row("max-map", "rollout", "max", 1.0),
        row("relevance", "relevance", None, 40.0),
    )
    pairs = (PairRow("mean-map", "max-map", Estimate(0.1, 0.05, 0.15, images, "")),)
    config = Config(models=(ModelEntry("vit", "vit"),), data=Data("scenes", images=images))
    return RolloutRecord(config=config, methods=rows, pairs=pairs, shown=(ImageRow("a"),))


def said(record: RolloutRecord) -> dict[str, str]:
    claims = list(REPORT.claims(record))
    assert not list(contradictions(claims))
    return {claim.question: claim.says for claim in claims if claim.is_shown}


def test_what_was_planted_is_found_and_nothing_beyond_its_limit():
    found = said(planted())
    assert found.keys() == {"pointing game", "information", "fusion of heads"}
    assert "1 of 3" in found["pointing game"]
    assert "**relevance**" in found["pointing game"]
    flat, not_flat = (said(planted(information=Estimate(v, v - 0.1, v + 0.1, 40, "bits"))) for v in (0.2, 0.45))
    assert "**mean-map** is nearly uniform" in flat["information"]
    assert "nearly uniform" not in not_flat["information"]
    fixed, not_fixed = (said(planted(by_place=Estimate(v, v - 0.03, v + 0.03, 40))) for v in (0.95, 0.77))
    assert "**mean-map**" in fixed["fixed places"]
    assert "fixed places" not in not_fixed
    missing = said(planted(difference=Estimate(-40.0, -50.0, -30.0, 40, "points")))
    assert "**mean-map**" in missing["maps that miss the object"]
    none = planted()
    assert "None of 2" in said(replace(none, methods=none.methods[:2]))["pointing game"]  # gains of 0 and 1 points


def test_of_few_images_nothing_is_claimed():
    few = planted(images=19)
    assert not said(few)
    assert not {"Do the maps find the object?", "Do the maps agree?"} & {part.title for part in REPORT(few).sections}


def test_no_hits_on_few_images_are_not_shown_to_be_fewer_than_by_chance():
    """0 of 16 where chance is an eighth: the interval of the rate reaches 19 %."""
    masks = torch.zeros(16, 8, 8, dtype=torch.bool)
    masks[:, :, :1] = True
    maps = torch.zeros(16, 8, 8)
    maps[:, 0, 7] = 1.0
    (row,) = on_object_rows("vit", [("map", maps)], "pointing", masks)
    assert (row.estimate.value, row.baseline) == (0.0, "the mean mask of the other images")
    spread = masks.clone()
    for image in range(16):
        spread[image] = torch.roll(masks[image], image % 7, dims=1)
    (row,) = on_object_rows("vit", [("map", maps)], "pointing", spread)
    assert row.estimate.value == 0.0
    assert row.of_baseline.value < 0.2
    assert row.side is Side.UNDECIDED


def test_no_baseline_is_of_the_same_photograph_stored_twice():
    masks = torch.zeros(8, 8, 8, dtype=torch.bool)
    for image in range(8):
        masks[image, image // 2] = True  # four photographs, each twice; each map is right
    twice, named = torch.arange(8) // 2, [("map", masks.float())]
    (apart,) = on_object_rows("vit", named, "mass", masks, sources=twice)
    (mixed,) = on_object_rows("vit", named, "mass", masks)
    assert apart.baseline in ("a uniform map", "a map of the centre")  # of the others, none is on the object
    assert mixed.of_baseline.value > apart.of_baseline.value

"""The record of `vitlens ablate` holds what the functions compute; killed runs are resumed; wrong calls refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.making import digits, save
from tests.kit.simulated_processes import run_in_processes
from vitlens import load
from vitlens.analysis.ablation import bench as analysis
from vitlens.analysis.ablation.bench import Bench
from vitlens.analysis.patching.patching import corrupt
from vitlens.commands.ablate.measure import measure
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.record import AblateRecord, fewest_images
from vitlens.commands.ablate.report import REPORT
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.errors import DataError, InputError, UnsupportedError
from vitlens.record import flat, read_run
from vitlens.uncertainty import LEVEL

RUN = RunOptions(device="cpu", limit=12, batch_size=6, quiet=True)
PLAIN = AblateOptions("", data="digits", curves=False, pairs=0, patch=False, run=RUN)
HEADS = replace(PLAIN, units=("head",), replace=("zero",))


def run(model: Path | str, out: Path | None, options: AblateOptions = PLAIN, **changes: object) -> AblateRecord:
    """The record of a run, with other options, or other run options, than those given."""
    own = {name: changes.pop(name) for name in ("limit", "seed", "batch_size") if name in changes}
    report = measure(replace(options, model=str(model), run=replace(options.run, out=out, **own), **changes))
    return read_folder(report.parent)


def test_numbers_are_those_of_the_functions(tiny_vit, tmp_path):
    record = run(tiny_vit, tmp_path / "out", replace=("zero",))
    split, model = digits("test").limit(12), load(str(tiny_vit))
    (batch,) = split.batches(12)
    importance = vitlens.ablate(model, split, replace="zero", kinds=("head", "mlp", "block"))
    units = importance.units
    effects = Bench(model, batch.images, batch.labels, "zero").without([(unit,) for unit in units])
    for index, (unit, row) in enumerate(zip(units, record.units, strict=True)):
        part = unit.kind if unit.head is None else unit.head
        assert (row.kind, row.layer, row.head) == (unit.kind, unit.layer, unit.head)
        for name, own, change in (("loss", row.loss, importance.loss), ("accuracy", row.accuracy, importance.accuracy)):
            assert record.metric(f"importance/tiny-vit/delta_{name}/{unit.layer}/{part}") == own
            assert own.value == pytest.approx(change.mean[index].item(), rel=1e-4, abs=1e-6)
            assert own.low <= own.value <= own.high
        assert row.matters == (row.p <= LEVEL)
    assert record.metric("heads_that_matter/tiny-vit").value == np.mean([row.matters for row in record.heads])
    spared = [row.effect == "no effect" for row in record.heads]
    assert record.metric("heads_without_effect/tiny-vit").value == np.mean(spared)
    arrays = record.effects["zero"]
    assert arrays.units.tolist() == [row.unit for row in record.units]
    np.testing.assert_allclose(arrays.delta_loss, effects.delta_loss.numpy(), rtol=1e-3, atol=1e-5)
    assert vitlens.read(tmp_path / "out").table("units") == list(record.units)


def test_one_row_holds_every_replacement(tiny_vit, tmp_path):
    record = run(tiny_vit, tmp_path / "out", replace=("mean", "zero"))
    alone = run(tiny_vit, tmp_path / "zero", replace=("zero",))
    for row, other in zip(record.units, alone.units, strict=True):
        assert row.other_losses["zero"].value == pytest.approx(other.loss.value, abs=1e-6)
        assert row.other_effects["zero"] == other.effect
        assert flat(row)["other_losses_zero"] == row.other_losses["zero"].value
    new = {"forward_equivalents/tiny-vit/mean", "rank_correlation/tiny-vit/zero"}
    assert record.metrics.keys() - alone.metrics.keys() == new


@pytest.fixture
def calls(monkeypatch) -> SimpleNamespace:
    """made: the number of measurements; fatal: the one that raises ZeroDivisionError."""
    plain, counted = analysis.loss_and_correct, SimpleNamespace(made=0, fatal=0)

    def counting(*args: object) -> object:
        counted.made += 1
        return 1 / 0 if counted.made == counted.fatal else plain(*args)

    monkeypatch.setattr(analysis, "loss_and_correct", counting)
    return counted


def test_a_killed_run_goes_on_at_the_layer_it_was_at(tiny_vit, tmp_path, calls):
    whole = run(tiny_vit, tmp_path / "whole")
    every = calls.made
    calls.made, calls.fatal = 0, 5  # in the second batch
    with pytest.raises(ZeroDivisionError):
        run(tiny_vit, tmp_path / "out")
    assert read_run(tmp_path / "out").status == "failed"
    stored = len(list((tmp_path / "out" / "progress").glob("*.npz")))
    calls.made = calls.fatal = 0
    again = run(tiny_vit, None, resume=tmp_path / "out")
    assert calls.made == every - stored < every  # what was stored was not measured again
    assert again.metrics == whole.metrics  # also the forward equivalents: recalled outcomes are counted at their cost
    assert (again.status, again.tables) == ("done", whole.tables)
    assert not (tmp_path / "out" / "progress").exists()


def test_resume_refuses_another_model_and_other_data(tiny_vit, tmp_path, calls):
    (batch,) = digits("test").limit(12).batches(12)
    pixels = (batch.images.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    np.savez(tmp_path / "a.npz", images=pixels, labels=batch.labels.numpy())
    given: dict[str, Any] = {"model": tiny_vit, "data": str(tmp_path / "a.npz")}
    calls.fatal = 3
    with pytest.raises(ZeroDivisionError):
        run(**given, out=tmp_path / "out")
    calls.fatal = 0
    other = load(str(tiny_vit))
    other.module.head.bias.data.add_(1)
    save(other, tmp_path / "other" / "model.safetensors")
    for changes, message in (
        ({"model": tmp_path / "other"}, "with its model"),
        ({"limit": 1}, "with its images"),
        ({"seed": 1}, "with its seed"),
        ({"replace": ("zero",)}, "with its replace"),
        ({"resume": tmp_path / "nothing"}, "folder of a run"),
    ):
        with pytest.raises(InputError, match=message):
            run(**{**given, "out": None, "resume": tmp_path / "out", **changes})
    np.savez(tmp_path / "a.npz", images=255 - pixels, labels=batch.labels.numpy())
    with pytest.raises(InputError, match="found others"):
        run(**given, out=None, resume=tmp_path / "out")


def test_a_pruned_model_is_a_model_for_other_commands(tiny_vit, tmp_path):
    record = run(tiny_vit, tmp_path / "out", prune=0.25, save=tmp_path / "pruned", replace=("zero",))
    whole, pruned = record.pruned
    assert (whole.heads, pruned.heads) == (4, 3)
    assert whole.accuracy == record.model.accuracy
    assert load(str(tmp_path / "pruned")).parameter_count() == pruned.parameters < whole.parameters
    least = min(record.heads, key=lambda row: row.loss.value)
    assert (whole.cut, pruned.cut) == ((), (least.unit,))


def test_two_processes_give_the_results_of_one(tiny_vit, tmp_path, monkeypatch):
    options = replace(PLAIN, model=str(tiny_vit), curves=True, pairs=2)
    one = run(tiny_vit, tmp_path / "one", options)

    def work(_processes: object) -> Path | None:
        return measure(replace(options, run=replace(RUN, out=tmp_path / "two")))

    assert run_in_processes(2, work, monkeypatch) == [tmp_path / "two" / "report.md", None]
    two = read_folder(tmp_path / "two")
    assert two.metrics.keys() == one.metrics.keys()
    for name, metric in one.metrics.items():
        assert two.metrics[name].value == pytest.approx(metric.value, rel=1e-4, abs=1e-6), name


def test_refusals_write_nothing(tiny_vit, tiny_cnn, pictures, tmp_path):
    for error, message, model, changes in (
        (UnsupportedError, None, tiny_cnn, {}),
        (DataError, "--predicted", tiny_vit, {"data": None, "images": (str(pictures),)}),
        (InputError, None, tmp_path / "nothing", {}),
        (InputError, "at least 8 images.*--replace resample", tiny_vit, {"limit": 5, "replace": ("mean", "zero")}),
        (InputError, "--clean and --corrupted together", tiny_vit, {"clean": Path("a.png")}),
        (InputError, "--save with --prune", tiny_vit, {"save": Path("there")}),
    ):
        with pytest.raises(error, match=message):
            run(model, tmp_path / "out", **changes)
        assert not (tmp_path / "out").exists()


def test_a_note_says_that_all_images_are_misclassified(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.neg_()
    save(model, tmp_path / "wrong" / "model.safetensors")
    [note] = run(tmp_path / "wrong", tmp_path / "out", HEADS).model.notes
    assert "none of the 12 images" in note
    assert note[1:] in (tmp_path / "out" / "report.md").read_text()


def test_folders_named_by_some_of_the_models_classes(tiny_vit, tmp_path):
    """Labels become columns of the logits exactly once: the two classes of the data are 3 and 9 of the model."""
    for batch in digits("test").limit(40).batches(1):
        if int(batch.labels[0]) in (3, 9):
            place = tmp_path / "data" / "test" / str(int(batch.labels[0]))
            place.mkdir(parents=True, exist_ok=True)
            picture = (batch.images[0] * 255).round().byte().permute(1, 2, 0).numpy()
            Image.fromarray(picture).save(place / f"{int(batch.indices[0])}.png")
    record = run(tiny_vit, tmp_path / "out", data=str(tmp_path / "data"))
    assert sorted(set(record.effects["mean"].labels.tolist())) == [3, 9]


@pytest.mark.parametrize(("images", "by"), [(1, "zero"), (5, "resample"), (8, "mean")])
def test_few_images_take_another_replacement_than_their_mean(images, by, tiny_vit, tmp_path):
    """Nor are heads ranked without a significant effect: no removal in order, no removable share, no such figure."""
    record = run(tiny_vit, tmp_path / "out", limit=images, curves=True, pairs=5, prune=0.5, units=("head",))
    assert record.options["replace"] == [by]
    assert {row.replace for row in record.units} == {record.model.replace} == {by}
    assert bool(record.model.reason) == (by != "mean")
    assert record.model.reason in (tmp_path / "out" / "report.md").read_text()
    if images < 8:
        assert (record.model.removable, record.curves, record.pairs) == (None, (), ())
        assert {path.stem for path in (tmp_path / "out" / "figures").glob("*.png")} == {"importance"}
    if images == 1:  # no interval and no test
        assert record.metric("importance/tiny-vit/delta_loss/0/0").low is None
        assert {(row.p, row.effect) for row in record.units} == {(None, "undecided")}


def test_own_photographs_are_ablated_with_the_predictions_as_labels(tiny_vit, pictures, tmp_path):
    record = run(tiny_vit, tmp_path / "out", HEADS, data=None, images=(str(pictures),), predicted=True)
    right = record.metric("accuracy/tiny-vit")
    assert (right.value, right.n) == (1.0, 3)


def test_resampling_does_not_depend_on_the_batches(tiny_vit, tmp_path):
    """A last batch of one image has no other image in it."""
    one, two = (run(tiny_vit, tmp_path / str(size), replace=("resample",), batch_size=size, limit=9) for size in (9, 4))
    for row, other in zip(one.units, two.units, strict=True):
        assert other.loss.value == pytest.approx(row.loss.value, abs=1e-5), row.unit


def test_a_ranking_needs_enough_images():
    # two-sided sign flips of n images: 2 / 2^n, times Holm's number of units
    assert [fewest_images(units) for units in (1, 36, 144)] == [6, 11, 13]
    assert 36 * 2 / 2**11 <= 0.05 < 36 * 2 / 2**10


def test_the_lens_ends_and_curves_begin_at_the_whole_model(pictures, tmp_path):
    shown = {"clean": pictures / "0.png", "corrupted": pictures / "1.png"}
    options = replace(HEADS, patch=True, curves=True, **shown)
    record = run("vit-digits", tmp_path / "out", options, limit=20, batch_size=20)
    [patching] = record.patching
    assert (patching.clean, patching.corrupted, patching.corruption) == ("0.png", "1.png", "")
    assert {row.part for row in record.contributions} == {"head", "MLP", "rest"}
    assert record.lens[-1].accuracy.value == pytest.approx(record.model.accuracy.value)
    for count in (0, len(record.heads)):
        ends = {(row.accuracy.value, row.loss) for row in record.curves if row.removed == count}
        assert len(ends) == 1  # of every order


@pytest.mark.slow
def test_the_default_pair_is_an_image_and_its_corrupted_copy(tmp_path):
    """So that a position in one is that of the other."""
    record = run("vit-digits", tmp_path / "out", HEADS, limit=4, patch=True)
    [patching], arrays = record.patching, record.patched
    clean, corrupted = (torch.from_numpy(image)[None] for image in (arrays.clean, arrays.corrupted))
    torch.testing.assert_close(corrupt(clean, patching.corruption), corrupted)
    assert patching.corrupted.startswith(f"{patching.clean}, ")
    assert patching.target == patching.clean != patching.other
    assert patching.difference_clean > 0 > patching.difference_corrupted
    assert "patching" in {figure.name for figure in REPORT(record).figures}

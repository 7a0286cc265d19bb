"""The record of `vitlens ablate` holds what the functions compute; killed runs are resumed; wrong calls refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.simulated_processes import run_in_processes
from vitlens.analysis.ablation import joint as analysis
from vitlens.analysis.ablation.ablate import measure_effects, units_of
from vitlens.analysis.ablation.importance import summarise
from vitlens.analysis.patching.corruption import corrupt
from vitlens.cli.main import run as main
from vitlens.commands.ablate.measure import measure
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.record import AblateRecord, fewest_images
from vitlens.commands.ablate.report import REPORT
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read
from vitlens.data.digits import digits
from vitlens.errors import DataError, InputError, UnsupportedError
from vitlens.files import read_run
from vitlens.models.loading import load
from vitlens.models.saved import save
from vitlens.record import flat
from vitlens.uncertainty import LEVEL

RUN = RunOptions(device="cpu", limit=12, batch_size=6, quiet=True)
PLAIN = AblateOptions("", data="digits", curves=False, pairs=0, patch=False, run=RUN)


def run(model: Path | str, out: Path | None, options: AblateOptions = PLAIN, **changes: object) -> AblateRecord:
    """The record of a run, with other options, or other run options, than those given."""
    own = {name: changes.pop(name) for name in ("limit", "seed", "batch_size") if name in changes}
    report = measure(replace(options, model=str(model), run=replace(options.run, out=out, **own), **changes))
    return read(read_run(report.parent))


def test_numbers_are_those_of_the_functions(tiny_vit, tmp_path):
    record = run(tiny_vit, tmp_path / "out", replace=("zero",))
    split, model = digits("test").limit(12), load(str(tiny_vit))
    (batch,) = split.batches(12)
    units = units_of(model)
    effects = measure_effects(model, batch.images, batch.labels, units, replace="zero")
    importance = summarise(effects, groups=split.groups)
    for index, (unit, row) in enumerate(zip(units, record.units, strict=True)):
        part = unit.kind if unit.head is None else unit.head
        assert (row.kind, row.layer, row.head) == (unit.kind, unit.layer, unit.head)
        for name, own, change in (("loss", row.loss, importance.loss), ("accuracy", row.accuracy, importance.accuracy)):
            assert record.metric(f"importance/tiny-vit/delta_{name}/{unit.layer}/{part}") == own
            assert own.value == pytest.approx(change.mean[index].item(), rel=1e-4, abs=1e-6)
            assert own.low <= own.value <= own.high
        assert row.matters == (row.p <= LEVEL)
    heads = [row for row in record.units if row.kind == "head"]
    assert record.metric("heads_that_matter/tiny-vit").value == np.mean([row.matters for row in heads])
    assert record.metric("heads_without_effect/tiny-vit").value == np.mean([r.effect == "no effect" for r in heads])
    arrays = record.effects["zero"]
    assert arrays.units.tolist() == [row.unit for row in record.units]
    assert heads[3].unit == "L1.H1"
    np.testing.assert_allclose(arrays.delta_loss, effects.delta_loss.numpy(), rtol=1e-3, atol=1e-5)
    assert not (tmp_path / "out" / "progress").exists()
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


class KilledError(Exception):
    """In place of a kill."""


def test_a_killed_run_goes_on_at_the_layer_it_was_at(tiny_vit, tmp_path, monkeypatch):
    whole = run(tiny_vit, tmp_path / "whole")
    plain, calls = analysis.loss_and_correct, []

    def dying(*args: object) -> object:
        calls.append(1)
        if len(calls) == 5:  # in the second batch
            raise KilledError
        return plain(*args)

    monkeypatch.setattr(analysis, "loss_and_correct", dying)
    with pytest.raises(KilledError):
        run(tiny_vit, tmp_path / "out")
    assert read_run(tmp_path / "out").status == "failed"
    stored = len(list((tmp_path / "out" / "progress").glob("*.npz")))
    assert stored > 0
    calls.clear()
    monkeypatch.setattr(analysis, "loss_and_correct", lambda *args: calls.append(1) or plain(*args))
    again = run(tiny_vit, None, resume=tmp_path / "out")
    first = len(calls)
    assert again.status == "done"
    assert again.metrics == whole.metrics  # also the forward equivalents: recalled outcomes are counted at their cost
    assert again.tables == whole.tables
    calls.clear()
    run(tiny_vit, tmp_path / "anew")
    assert first == len(calls) - stored  # what was stored was not measured again
    assert not (tmp_path / "out" / "progress").exists()


def test_resume_refuses_another_model_other_data_and_other_commands(tiny_vit, tmp_path):
    run(tiny_vit, tmp_path / "out")
    other = load(str(tiny_vit))
    other.module.head.bias.data.add_(1)
    save(other, tmp_path / "other" / "model.safetensors")
    for changes, message in (
        ({"model": tmp_path / "other"}, "its model"),
        ({"limit": 11}, "its images"),
        ({"seed": 1}, "its seed"),
        ({"replace": ("zero",)}, "its replace"),
    ):
        whole = {"model": tiny_vit, **changes}
        with pytest.raises(InputError, match=f"with {message}"):
            run(whole.pop("model"), None, resume=tmp_path / "out", **whole)
    with pytest.raises(InputError, match="folder of a run"):
        run(tiny_vit, None, resume=tmp_path / "nothing")


def test_resume_refuses_other_images_of_the_same_number(tiny_vit, tmp_path, monkeypatch):
    plain, calls = analysis.loss_and_correct, []
    monkeypatch.setattr(
        analysis, "loss_and_correct", lambda *args: calls.append(1) or (plain(*args) if len(calls) < 3 else 1 / 0)
    )
    images = digits("test").limit(12)
    (batch,) = images.batches(12)
    pixels = (batch.images.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    np.savez(tmp_path / "a.npz", images=pixels, labels=batch.labels.numpy())
    with pytest.raises(ZeroDivisionError):
        run(tiny_vit, tmp_path / "out", data=str(tmp_path / "a.npz"))
    monkeypatch.setattr(analysis, "loss_and_correct", plain)
    np.savez(tmp_path / "a.npz", images=255 - pixels, labels=batch.labels.numpy())
    with pytest.raises(InputError, match="found others"):
        run(tiny_vit, None, data=str(tmp_path / "a.npz"), resume=tmp_path / "out")


def test_one_image_has_no_interval_and_no_test(tiny_vit, tmp_path):
    record = run(tiny_vit, tmp_path / "out", limit=1)
    assert record.metric("importance/tiny-vit/delta_loss/0/0").low is None
    assert {(row.p, row.effect) for row in record.units} == {(None, "undecided")}
    document = REPORT(record)
    assert not document.claims
    assert not document.first.answer


def test_a_pruned_model_is_a_model_for_other_commands(tiny_vit, tmp_path):
    record = run(tiny_vit, tmp_path / "out", prune=0.25, save=tmp_path / "pruned", replace=("zero",))
    whole, pruned = record.pruned
    assert (whole.heads, pruned.heads) == (4, 3)
    assert pruned.parameters < whole.parameters
    again = load(str(tmp_path / "pruned"))
    assert again.parameter_count() == pruned.parameters
    least = min(record.heads, key=lambda row: row.loss.value)
    assert (whole.cut, pruned.cut) == ((), (least.unit,))


def test_two_processes_give_the_results_of_one(tiny_vit, tmp_path, monkeypatch):
    options = replace(PLAIN, model=str(tiny_vit), curves=True, pairs=2)
    one = run(tiny_vit, tmp_path / "one", options)

    def work(_processes: object) -> Path | None:
        return measure(replace(options, run=replace(RUN, out=tmp_path / "two")))

    assert run_in_processes(2, work, monkeypatch) == [tmp_path / "two" / "report.md", None]
    two = read(read_run(tmp_path / "two"))
    assert two.metrics.keys() == one.metrics.keys()
    for name, metric in one.metrics.items():
        assert two.metrics[name].value == pytest.approx(metric.value, rel=1e-4, abs=1e-6), name


def test_refusals_write_nothing(tiny_vit, tiny_cnn, pictures, tmp_path):
    for error, model, changes in (
        (UnsupportedError, tiny_cnn, {}),
        (DataError, tiny_vit, {"data": str(pictures)}),
        (InputError, tmp_path / "nothing", {}),
    ):
        with pytest.raises(error):
            run(model, tmp_path / "out", **changes)
        assert not (tmp_path / "out").exists()


def test_a_note_says_that_all_images_are_misclassified(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.neg_()
    save(model, tmp_path / "wrong" / "model.safetensors")
    record = run(tmp_path / "wrong", tmp_path / "out")
    [note] = record.model.notes
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


def typed(model: Path, out: Path, *more: str) -> int:
    return main(["ablate", str(model), "--device", "cpu", "--quiet", "--no-patch", "--out", str(out), *more])


@pytest.mark.parametrize(("images", "by"), [(1, "zero"), (5, "resample"), (8, "mean")])
def test_few_images_take_another_replacement_than_their_mean(images, by, tiny_vit, tmp_path):
    out = tmp_path / "out"
    assert typed(tiny_vit, out, "--data", "digits", "--limit", str(images), "--units", "head") == 0
    record = read(read_run(out))
    assert record.options["replace"] == [by]
    assert {row.replace for row in record.units} == {record.model.replace} == {by}
    assert bool(record.model.reason) == (by != "mean")
    assert record.model.reason in (out / "report.md").read_text()


def test_a_mean_over_few_images_is_refused_where_it_is_asked_for(tiny_vit, tmp_path, capsys):
    asked = ["--data", "digits", "--limit", "5", "--replace", "mean,zero"]
    assert typed(tiny_vit, tmp_path / "out", *asked) == 2
    message = capsys.readouterr().err
    assert "at least 8 images" in message
    assert "--replace resample" in message
    assert not (tmp_path / "out").exists()


def test_heads_without_a_significant_effect_are_not_ranked(tiny_vit, tmp_path):
    """Five images cannot show an effect: no ranking, no removal in order, no removable share, no ranking figure."""
    out = tmp_path / "out"
    assert typed(tiny_vit, out, "--data", "digits", "--limit", "5", "--prune", "0.5") == 0
    record = read(read_run(out))
    assert record.model.removable is None
    assert (record.curves, record.pairs) == ((), ())
    assert {path.stem for path in (out / "figures").glob("*.png")} == {"importance", "others"}


def test_own_photographs_are_ablated_with_the_predictions_as_labels(tiny_vit, pictures, tmp_path, capsys):
    given = ["--images", str(pictures), "--units", "head", "--pairs", "0"]
    assert typed(tiny_vit, tmp_path / "out", *given) == 2
    assert "--predicted" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert typed(tiny_vit, tmp_path / "out", *given, "--predicted") == 0
    right = read(read_run(tmp_path / "out")).metric("accuracy/tiny-vit")
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


def test_the_images_of_clean_and_corrupted_have_their_file_names(pictures, tmp_path):
    shown = {"clean": pictures / "0.png", "corrupted": pictures / "1.png"}
    options = replace(PLAIN, patch=True, units=("head",), replace=("zero",), **shown)
    [patching] = run("vit-digits", tmp_path / "out", options, limit=2).patching
    assert (patching.clean, patching.corrupted, patching.corruption) == ("0.png", "1.png", "")


def test_the_lens_ends_and_curves_begin_at_the_whole_model(tmp_path):
    options = replace(PLAIN, patch=True, curves=True, units=("head",), replace=("zero",))
    record = run("vit-digits", tmp_path / "out", options, limit=20, batch_size=20)
    assert {row.part for row in record.contributions} == {"head", "MLP", "rest"}
    assert record.lens[-1].accuracy.value == pytest.approx(record.model.accuracy.value)
    for count in (0, len(record.heads)):
        ends = {(row.accuracy.value, row.loss) for row in record.curves if row.removed == count}
        assert len(ends) == 1  # of every order


@pytest.mark.slow
def test_the_default_pair_is_an_image_and_its_corrupted_copy(tmp_path):
    """So that a position in one is that of the other."""
    options = replace(PLAIN, patch=True, units=("head",), replace=("zero",))
    record = run("vit-digits", tmp_path / "out", options, limit=4)
    [patching], arrays = record.patching, record.patched
    clean, corrupted = (torch.from_numpy(image)[None] for image in (arrays.clean, arrays.corrupted))
    torch.testing.assert_close(corrupt(clean, patching.corruption), corrupted)
    assert patching.corrupted.startswith(f"{patching.clean}, ")
    assert patching.target == patching.clean != patching.other
    assert patching.difference_clean > 0 > patching.difference_corrupted
    assert "patching" in {figure.name for figure in REPORT(record).figures}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clean": Path("a.png")}, "--clean and --corrupted together"),
        ({"save": Path("there")}, "--save with --prune"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        AblateOptions("vit-digits", **options)

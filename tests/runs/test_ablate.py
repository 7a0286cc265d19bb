"""The ablation report says what the functions compute; a killed run goes on; wrong calls are refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.together import together
from vitlens.analysis import together as analysis
from vitlens.analysis.ablate import measure_effects, units_of
from vitlens.analysis.importance import summarise
from vitlens.data.digits import digits
from vitlens.errors import DataError, InputError, UnsupportedError
from vitlens.models.zoo import load, save
from vitlens.runs.ablate import ablate
from vitlens.runs.ablate_choices import AblateChoices
from vitlens.runs.options import ModelOptions, RunOptions

OPTIONS = RunOptions(device="cpu", limit=12, batch_size=6, quiet=True)
PLAIN = AblateChoices(curves=False, pairs=0, patch=False)


def run(model: Path | str, out: Path | None, choices: AblateChoices = PLAIN, **changes: object) -> dict:
    options = replace(OPTIONS, out=out, **{key: changes.pop(key) for key in ("limit", "seed") if key in changes})
    written = ablate(
        str(model), choices=choices, model_options=ModelOptions(), options=options, **{"data": "digits", **changes}
    )
    return json.loads((written.parent / "results.json").read_text())


def test_numbers_are_those_of_the_functions(tiny_vit, tmp_path):
    results = run(tiny_vit, tmp_path / "out", replace(PLAIN, replace=("zero",)))
    split, specimen = digits("test").limit(12), load(str(tiny_vit))
    (batch,) = split.batches(12)
    units = units_of(specimen)
    effects = measure_effects(specimen, batch.images, batch.labels, units, replace="zero")
    importance = summarise(effects, groups=split.groups)
    for index, unit in enumerate(units):
        metric = results["metrics"][f"importance/delta_loss/{unit.name.removeprefix('head/')}"]
        assert metric["value"] == pytest.approx(importance.loss.mean[index].item(), rel=1e-4, abs=1e-6)
        assert metric["low"] <= metric["value"] <= metric["high"]
    rows = results["tables"]["units"]
    assert [row["unit"] for row in rows] == [unit.name for unit in units]
    kept = np.load(tmp_path / "out" / "arrays" / "effects-zero.npz")
    np.testing.assert_allclose(kept["delta_loss"], effects.delta_loss.numpy(), rtol=1e-3, atol=1e-5)
    assert not (tmp_path / "out" / "progress").exists()


class KilledError(Exception):
    """In place of a kill."""


def test_a_killed_run_goes_on_at_the_layer_it_was_at(tiny_vit, tmp_path, monkeypatch):
    whole = run(tiny_vit, tmp_path / "whole")
    judge, calls = analysis.judge, []

    def dying(*args: object) -> object:
        calls.append(1)
        if len(calls) == 5:  # in the second batch: its clean pass, and the units of its layers, come after
            raise KilledError
        return judge(*args)

    monkeypatch.setattr(analysis, "judge", dying)
    with pytest.raises(KilledError):
        run(tiny_vit, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "results.json").read_text())["status"] == "failed"
    kept = len(list((tmp_path / "out" / "progress").glob("*.npz")))
    assert kept > 0
    calls.clear()
    monkeypatch.setattr(analysis, "judge", lambda *args: calls.append(1) or judge(*args))
    again = run(tiny_vit, None, resume=tmp_path / "out")
    first = len(calls)
    assert again["status"] == "done"
    assert again["metrics"] == whole["metrics"]  # what was recalled cost something: forward equivalents are equal too
    assert again["tables"] == whole["tables"]
    calls.clear()
    run(tiny_vit, tmp_path / "anew")
    assert first == len(calls) - kept  # what was kept was not measured again
    assert not (tmp_path / "out" / "progress").exists()


def test_resume_refuses_another_model_other_data_and_other_commands(tiny_vit, tmp_path):
    run(tiny_vit, tmp_path / "out")
    other = load(str(tiny_vit))
    other.model.head.bias.data.add_(1)
    save(other, tmp_path / "other" / "model.safetensors")
    for changes, said in (
        ({"model": tmp_path / "other"}, "its model"),
        ({"limit": 11}, "its images"),
        ({"seed": 1}, "its seed"),
        ({"choices": replace(PLAIN, replace=("zero",))}, "its replace"),
    ):
        whole = {"model": tiny_vit, **changes}
        with pytest.raises(InputError, match=f"with {said}"):
            run(whole.pop("model"), None, resume=tmp_path / "out", **whole)
    with pytest.raises(InputError, match="folder of a run"):
        run(tiny_vit, None, resume=tmp_path / "nothing")


def test_resume_refuses_other_images_of_the_same_number(tiny_vit, tmp_path, monkeypatch):
    judge, calls = analysis.judge, []
    monkeypatch.setattr(analysis, "judge", lambda *args: calls.append(1) or (judge(*args) if len(calls) < 3 else 1 / 0))
    images = digits("test").limit(12)
    (batch,) = images.batches(12)
    pixels = (batch.images.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    np.savez(tmp_path / "a.npz", images=pixels, labels=batch.labels.numpy())
    with pytest.raises(ZeroDivisionError):
        run(tiny_vit, tmp_path / "out", data=str(tmp_path / "a.npz"))
    monkeypatch.setattr(analysis, "judge", judge)
    np.savez(tmp_path / "a.npz", images=255 - pixels, labels=batch.labels.numpy())
    with pytest.raises(InputError, match="found others"):
        run(tiny_vit, None, data=str(tmp_path / "a.npz"), resume=tmp_path / "out")


def test_one_image_has_no_interval_and_says_so(tiny_vit, tmp_path):
    results = run(tiny_vit, tmp_path / "out", limit=1)
    assert "low" not in results["metrics"]["importance/delta_loss/0/0"]
    assert "fewer than two images" in (tmp_path / "out" / "report.md").read_text()


def test_a_pruned_model_is_a_model_for_other_commands(tiny_vit, tmp_path):
    choices = replace(PLAIN, prune=0.25, save=tmp_path / "pruned", replace=("zero",))
    results = run(tiny_vit, tmp_path / "out", choices)
    whole, pruned = results["tables"]["pruned"]
    assert (whole["heads"], pruned["heads"]) == (4, 3)
    assert pruned["parameters"] < whole["parameters"]
    again = load(str(tmp_path / "pruned"))
    assert again.parameter_count() == pruned["parameters"]
    [cut] = results["tables"]["pruned_heads"]
    least = min((row for row in results["tables"]["units"] if row["kind"] == "head"), key=lambda row: row["delta_loss"])
    assert (cut["layer"], cut["heads"]) == (least["layer"], [least["head"]])


def test_two_processes_find_what_one_does(tiny_vit, tmp_path, monkeypatch):
    choices = replace(PLAIN, curves=True, pairs=2)
    one = run(tiny_vit, tmp_path / "one", choices)

    def work(_processes: object) -> Path | None:
        options = replace(OPTIONS, out=tmp_path / "two")
        return ablate(str(tiny_vit), data="digits", choices=choices, model_options=ModelOptions(), options=options)

    assert together(2, work, monkeypatch) == [tmp_path / "two" / "report.md", None]
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    assert two["metrics"].keys() == one["metrics"].keys()
    for name, metric in one["metrics"].items():
        assert two["metrics"][name]["value"] == pytest.approx(metric["value"], rel=1e-4, abs=1e-6), name


def test_refusals_write_nothing(tiny_vit, tiny_cnn, pictures, tmp_path):
    for error, model, changes in (
        (UnsupportedError, tiny_cnn, {}),
        (DataError, tiny_vit, {"data": str(pictures)}),
        (InputError, tmp_path / "nothing", {}),
    ):
        with pytest.raises(error):
            run(model, tmp_path / "out", **changes)
        assert not (tmp_path / "out").exists()


def test_images_that_are_all_wrong_are_said(tmp_path):
    specimen = load("vit-digits")
    specimen.model.head.weight.data.neg_()
    save(specimen, tmp_path / "wrong" / "model.safetensors")
    run(tmp_path / "wrong", tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Note:" in text

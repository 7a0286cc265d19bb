"""The explain report says what the functions compute."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlens.attribution.explain import explain as attribute
from vitlens.attribution.explain import methods_for
from vitlens.attribution.gradients import completeness_error
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.data.digits import digits
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.files import read_run
from vitlens.models.loading import load
from vitlens.models.saved import save
from vitlens.runs.explain import chosen_methods, explain

OPTIONS = RunOptions(device="cpu", limit=5, batch_size=3, quiet=True)


def run(models: list[Path | str], out: Path, **changes: object) -> dict:
    options = replace(OPTIONS, out=out, **changes.pop("options", {}))
    written = explain([str(model) for model in models], options=options, model_options=ModelOptions(), **changes)
    assert written == out / "report.md"
    return json.loads((out / "results.json").read_text())


def test_maps_are_the_functions(tiny_vit, tmp_path):
    methods = ("relevance", "gradcam", "smoothgrad", "integrated-gradients")
    results = run([tiny_vit], tmp_path / "out", data="digits", method=methods, target="true", options={"seed": 4})
    model, split = load(str(tiny_vit)), digits("test", seed=4).limit(5, seed=4)
    (batch,) = split.batches(5)
    kept = np.load(tmp_path / "out" / "arrays" / f"explain-{model.alias}.npz")
    for name in methods:
        expected = attribute(model, batch.images, targets=batch.labels, method=name, seed=4)
        found = torch.from_numpy(kept[f"maps/{name}"])
        torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-3)
    gradients = torch.from_numpy(kept["maps/integrated-gradients"])
    error = completeness_error(model, batch.images, batch.labels, gradients).abs().mean().item()
    assert results["metrics"]["completeness/integrated-gradients"]["value"] == pytest.approx(error, rel=1e-2, abs=1e-5)
    assert results["metrics"]["completeness/integrated-gradients"]["n"] == 5
    assert [row["target"] for row in results["tables"]["images"]] == [str(int(label)) for label in batch.labels]
    assert [row["method"] for row in results["tables"]["methods"]] == list(methods)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "differs from F(image) - F(black)" in text
    assert "Each map is of the logit of the true class." in text


def test_models_beside_each_other_take_the_methods_they_have(tiny_vit, tiny_cnn, pictures, tmp_path):
    results = run([tiny_vit, tiny_cnn], tmp_path / "out", images=[str(pictures)], method=("relevance", "gradcam"))
    rows = [(row["model"], row["method"]) for row in results["tables"]["methods"]]
    assert rows == [("tiny-vit", "relevance"), ("tiny-vit", "gradcam"), ("tiny-cnn", "gradcam")]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "tiny-cnn has no relevance" in text
    assert sorted(path.name for path in (tmp_path / "out" / "figures").iterdir()) == [
        "explain_tiny-cnn.png",
        "explain_tiny-vit.png",
    ]


def test_the_usual_methods_and_all_of_them(tiny_vit, tiny_cnn):
    vit, cnn = load(str(tiny_vit)), load(str(tiny_cnn))
    assert chosen_methods([vit], ()) == [default_methods()]
    assert chosen_methods([cnn], ()) == [("gradcam", "integrated-gradients", "occlusion")]
    assert chosen_methods([vit, cnn], ("all",)) == [tuple(ATTRIBUTIONS), methods_for(cnn)]


def test_maps_that_say_nothing_are_flagged_and_not_drawn(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.zero_()  # no pixel changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    results = run([tmp_path / "blind"], tmp_path / "out", data="digits", method=("relevance", "saliency"))
    assert [row["constant"] for row in results["tables"]["methods"]] == [5, 5]
    assert not list((tmp_path / "out").glob("figures/*"))
    assert "5 of 5 maps of saliency of blind are the same everywhere" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    ("target", "message"), [("10", "from 0 to 9, found 10"), ("cat", "no class 'cat'"), ("true", "labelled images")]
)
def test_targets_that_cannot_be(tiny_vit, pictures, tmp_path, target, message):
    with pytest.raises(InputError, match=message):
        run([tiny_vit], tmp_path / "out", images=[str(pictures)], target=target)
    assert not (tmp_path / "out").exists()


def test_methods_that_cannot_be(tiny_vit, tiny_cnn, pictures, tmp_path):
    for error, models, method, message in (
        (UnsupportedError, [tiny_cnn], ("rollout",), r"tiny-cnn \(cnn\) has, found 'rollout'; it has gradcam"),
        (UnsupportedError, [tiny_cnn], ("gradcam", "rollout"), "found 'rollout'"),
        (UnsupportedError, [tiny_vit, tiny_cnn], ("relevance",), "tiny-cnn .* found 'relevance'"),
        (UnknownNameError, [tiny_vit], ("gradcm",), "did you mean 'gradcam'"),
    ):
        with pytest.raises(error, match=message):
            run(models, tmp_path / "out", images=[str(pictures)], method=method)
        assert not (tmp_path / "out").exists()


def test_a_verified_run_has_the_league_beside_the_maps(tiny_vit, tmp_path):
    results = run([tiny_vit], tmp_path / "out", data="digits", method=("relevance", "gradcam"), verify=True)
    assert {row["method"] for row in results["tables"]["league"]} == {"relevance", "gradcam", "random", "centre"}
    assert results["metrics"]["faithfulness/gap/gradcam"]["n"] == 5
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count("## Limits") == 1
    assert "Which map can be trusted" in text


def test_the_packages_own_maps_are_kept_and_said_to_be_its(tiny_vit, tmp_path):
    results = run([tiny_vit], tmp_path / "out", data="digits", method=("gradcam", "eigencam"), engine="grad-cam")
    rows = results["tables"]["methods"]
    assert [(row["title"], row["signed"]) for row in rows] == [
        ("GradCAM (grad-cam package)", False),
        ("EigenCAM (grad-cam package)", False),
    ]
    assert {row["source"] for row in rows} == {"grad-cam package, ReLU and min-max scaled"}
    assert {row["map"] for row in rows} == {"32x32"}
    maps = read_run(tmp_path / "out").arrays("explain-tiny-vit")["maps/gradcam"]
    assert (maps.min(), maps.max()) == (0, pytest.approx(1, abs=1e-5))
    assert "grad-cam package's own, unaltered" in (tmp_path / "out" / "report.md").read_text()


def test_the_package_has_class_activation_maps_alone(tiny_vit, tmp_path):
    assert chosen_methods([load(str(tiny_vit))], (), engine="grad-cam") == [("gradcam",)]
    with pytest.raises(UnsupportedError, match=r"engine grad-cam has \(gradcam, .*ablationcam\), found 'relevance'"):
        run([tiny_vit], tmp_path / "out", data="digits", method=("relevance",), engine="grad-cam")
    assert not (tmp_path / "out").exists()

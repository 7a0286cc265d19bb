"""`vitlens attack`: what a run leaves, resumes, shares out, refuses and says."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.together import together
from vitlens.analysis.robustness.curve import Outcome
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.errors import DataError, InputError, UnknownNameError
from vitlens.files import read_run
from vitlens.models.loading import load
from vitlens.models.saved import save
from vitlens.runs import attack_checks, attack_sweep
from vitlens.runs.attack import attack
from vitlens.runs.attack_choices import AttackChoices
from vitlens.runs.attack_sample import spread
from vitlens.runs.attack_sweep import Swept, Work
from vitlens.runs.sections import metrics

FEW = AttackChoices(
    attacks=("fgsm", "pgd", "cw"), epsilons=(0.0, 4.0, 32.0), epsilons_l2=(0.5, 2.0), steps=3, predicted=True,
    corruptions=False, inside=False,
)  # fmt: skip


def run(out: Path, models: list[str], choices: AttackChoices = FEW, **more: object) -> Path | None:
    resume = more.pop("resume", None)
    images = more.pop("images", None)
    settings = {"out": None if resume else out, "limit": 4, "batch_size": 2, **more}
    options = RunOptions(device="cpu", quiet=True, command="vitlens attack a b", **settings)  # type: ignore[arg-type]
    return attack(
        models, data=None if images else "digits", images=images, choices=choices, resume=resume,  # type: ignore[arg-type]
        model_options=ModelOptions(), options=options,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _checked_on_few() -> Iterator[None]:
    """The self-checks attack an image about a hundred times: two are enough here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attack_checks, "CHECKED", 2)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled pair attacked in what it predicts, all looked at."""
    out = tmp_path_factory.mktemp("attack") / "run"
    run(out, ["vit-digits", "cnn-digits"], AttackChoices(**{**vars(FEW), "inside": True}))
    return out


def test_the_folder_is_whole(folder):
    record, found = read_run(folder), metrics(read_run(folder))
    assert record.status == "done"
    assert not (folder / "progress").exists()
    for alias in ("vit-digits", "cnn-digits"):
        assert found[f"accuracy/{alias}"].value == 1  # its own predictions
        for name in ("fgsm-linf/4", "pgd-linf/32", "cw-l2/0.5", "pgd-linf/0"):
            estimate = found[f"robust_accuracy/{alias}/{name}"]
            assert estimate.n == 4
            assert estimate.low <= estimate.value <= estimate.high
    assert "robust_difference/vit-digits/cnn-digits/pgd-linf/4" in found
    assert {"made_for", "shown_to", "rate"} <= set(record.table("transfer")[0])
    assert len(record.table("curves")) == 2 * (3 + 3 + 3)


def test_curves_fall_and_are_those_of_the_arrays(folder):
    record = read_run(folder)
    for alias in ("vit-digits", "cnn-digits"):
        arrays = record.arrays(f"attack-{alias}")
        for attack_name in ("fgsm-linf", "pgd-linf", "cw-l2"):
            rows = [row for row in record.table("curves") if (row["model"], row["attack"]) == (alias, attack_name)]
            values = [row["accuracy"] for row in rows]
            assert values == sorted(values, reverse=True)
            scale = 255 if attack_name.endswith("linf") else 1
            broken_at = arrays[f"broken_at_{attack_name}"]
            for row in rows:
                assert row["accuracy"] == pytest.approx((broken_at * scale > row["epsilon"] + 1e-3).mean())


def test_what_changes_inside_is_told(folder):
    record, found = read_run(folder), metrics(read_run(folder))
    text = (folder / "report.md").read_text()
    fooled = {row["model"]: row["fooled"] for row in record.table("sample")}
    assert all(fooled.values())
    assert "map_agreement/vit-digits/spearman/relevance-for-the-true-class" in found
    assert "map_agreement/vit-digits/spearman/rollout" in found
    assert "map_agreement/cnn-digits/spearman/gradcam-for-each-prediction" in found
    assert {row["model"] for row in record.table("shifts")} == {"vit-digits"}
    assert {row["kind"] for row in record.table("blocks")} == {"adversarial", "noise", "another image"}
    for row in record.table("blocks"):
        assert -1 <= row["value"] <= 1.0001
    arrays = record.arrays("examples-vit-digits")
    assert np.abs(arrays["change"]).max() <= 32 / 255 + 1e-3
    assert "vit-digits, 1 − cosine of its last block's outputs with those for the clean images: " in text
    assert "after noise as strong (n = " in text
    for word in ("examples_vit-digits", "examples_cnn-digits", "paths", "shifts", "curves", "transfer"):
        assert f"figures/{word}.png" in text


def test_the_report_says_what_was_found(folder):
    text = (folder / "report.md").read_text()
    assert "Attacked at 32x32 px." in text
    assert "clean accuracy is 100 % by definition" in text
    assert "PGD L∞ leaves" in text
    assert ("The attacks on vit-digits look " in text) is True
    assert "| Self-checks" in text or "**Self-checks**" in text
    assert "fools cnn-digits on" in text
    assert "McNemar's exact test" in text
    assert "| PGD L∞ | 32/255 | vit-digits − cnn-digits |" in text


def test_checks_cover_every_attack(folder):
    rows = [row for row in read_run(folder).table("checks") if row["model"] == "vit-digits"]
    assert {row["attack"] for row in rows} >= {"fgsm-linf", "pgd-linf", "cw-l2", "gradients"}
    by_attack = {row["name"] for row in rows if row["attack"] == "pgd-linf"}
    found_far = {row["name"]: row for row in rows if row["attack"] == "cw-l2"}
    assert {"no limit", "more steps"} <= found_far.keys()
    assert found_far["no limit"]["passed"] is (found_far["no limit"]["found"] == "none found for 0 of 4")
    assert by_attack == {
        "curve", "gradients read", "epsilon 0", "within the budget", "batch size", "more steps", "no limit"
    }  # fmt: skip
    assert all(row["passed"] for row in rows if row["name"] in ("curve", "epsilon 0", "within the budget"))


def same_arrays(one: Path, other: Path, alias: str) -> None:
    first, second = (read_run(folder).arrays(f"attack-{alias}") for folder in (one, other))
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert np.array_equal(values, second[name]), name


class StoppedError(Exception):
    """Raised in the middle of a sweep."""


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch, tiny_vit):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    models, choices = [str(tiny_vit)], AttackChoices(**{**vars(FEW), "attacks": ("fgsm", "noise", "deepfool")})
    monkeypatch.setattr(attack_sweep, "A_PART", 1)
    run(whole, models, choices)
    real, calls = attack_sweep.sweep, []

    def stops(*args: object, **more: object) -> object:
        calls.append(more["attacks"])
        if len(calls) == 5:
            raise StoppedError
        return real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(attack_sweep, "sweep", stops)
    with pytest.raises(StoppedError):
        run(stopped, models, choices)
    assert read_run(stopped).status == "failed"
    assert len(list((stopped / "progress").glob("*.npz"))) == 4
    run(tmp_path / "unused", models, choices, resume=stopped)
    assert len(calls) == 5 + (3 * 2 - 4)  # three attacks on two parts, of which four were done
    same_arrays(whole, stopped, "tiny-vit")
    assert not (stopped / "progress").exists()
    assert read_run(stopped).status == "done"


def test_downwards_is_said_checked_and_not_resumed_upwards(tmp_path, tiny_vit, monkeypatch):
    models, both, real = [str(tiny_vit)], [], attack_checks.attempted

    def watched(work: Work, name: str, rows: torch.Tensor, **more: Any) -> object:
        both.append((name, more["downwards"]))
        return real(work, name, rows, **more)

    monkeypatch.setattr(attack_checks, "attempted", watched)
    few = AttackChoices(**{**vars(FEW), "attacks": ("pgd", "deepfool"), "steps": 2, "epsilons": (1.0, 8.0)})
    below = AttackChoices(**{**vars(few), "downwards": True})
    run(tmp_path / "up", models, few)
    run(tmp_path / "down", models, below)
    same_arrays(tmp_path / "up", tmp_path / "down", "tiny-vit")
    costs = [read_run(tmp_path / way).table("attacks")[0]["forwards"] for way in ("up", "down")]
    assert costs[0] > costs[1] > 0  # an image that stands at the largest epsilon is tried there alone
    assert both == [("pgd", True), ("pgd", False)]
    checks = {(row["name"], row["attack"]): row for row in read_run(tmp_path / "down").table("checks")}
    assert checks["from below", "pgd-linf"]["passed"]
    assert checks["from below", "pgd-linf"]["found"].startswith("0 of ")
    assert ("from below", "deepfool-l2") not in checks  # has no epsilons to try
    assert "from below" in (tmp_path / "down" / "report.md").read_text()
    assert "from below" not in (tmp_path / "up" / "report.md").read_text()
    with pytest.raises(InputError, match="with its epsilons"):
        run(tmp_path, models, few, resume=tmp_path / "down")


@pytest.mark.parametrize(("name", "images", "steps"), [("pgd", 16, None), ("auto", 6, 2)])
def test_a_slow_attack_is_tried_from_below_on_few_images_with_few_steps(monkeypatch, name, images, steps):
    asked = []

    def tried(_work: object, attack_name: str, rows: torch.Tensor, **more: object) -> object:
        asked.append((attack_name, len(rows), more["steps"]))
        return SimpleNamespace(broken_at={name: torch.full((len(rows),), 0.1 if more["downwards"] else 0.05)})

    monkeypatch.setattr(attack_checks, "attempted", tried)
    right, broken_at = torch.ones(16, dtype=torch.bool), torch.full((16,), 0.1)
    outcome = Outcome(f"{name}-linf", "vit", (0.1,), right, broken_at, None)
    swept = Swept(name, outcome, broken_at, ~right, 0, 0, 0.0)
    check = attack_checks._from_below(object.__new__(Work), swept, torch.arange(16))
    assert asked == [(name, images, steps)] * 2
    assert not check.passed
    assert check.found == f"{images} of {images} do"


def test_another_run_cannot_be_resumed(tmp_path, folder):
    models = ["vit-digits", "cnn-digits"]
    with pytest.raises(InputError, match="with its seed"):
        run(tmp_path, models, resume=folder, seed=3)
    with pytest.raises(InputError, match="with its attacks"):
        run(tmp_path, models, AttackChoices(**{**vars(FEW), "attacks": ("pgd",)}), resume=folder)


def test_several_processes_find_what_one_does(tmp_path, monkeypatch, tiny_vit):
    models = [str(tiny_vit)]
    choices = AttackChoices(
        attacks=("fgsm", "noise"), epsilons=(8.0, 64.0), steps=3, predicted=True, corruptions=False, inside=False
    )
    one = run(tmp_path / "one", models, choices)
    found = together(2, lambda processes: run(tmp_path / str(processes.index), models, choices), monkeypatch)
    assert found == [tmp_path / "0" / "report.md", None]
    assert one is not None
    same_arrays(tmp_path / "one", tmp_path / "0", "tiny-vit")


def test_corruptions_and_classes_of_labelled_images(tmp_path):
    choices = AttackChoices(attacks=("fgsm",), epsilons=(2.0, 8.0), inside=False, transfer=False, baseline="other")
    run(tmp_path / "run", ["cnn-digits", "other=cnn-digits@random"], choices, limit=10)
    record, found = read_run(tmp_path / "run"), metrics(read_run(tmp_path / "run"))
    assert found["corruption_accuracy/cnn-digits/noise/1"].n == 10
    assert found["mean_corruption_error/other/other"].value == pytest.approx(1)
    assert found["mean_corruption_error/cnn-digits/other"].value < 1
    assert {row["model"] for row in record.table("by_class")} == {"cnn-digits", "other"}
    text = (tmp_path / "run" / "report.md").read_text()
    assert "relative to other (100 %)" in text
    assert "figures/corruptions.png" in text
    assert "figures/classes.png" in text


def test_a_model_that_is_wrong_everywhere_is_said(tmp_path, tiny_vit):
    model = load(str(tiny_vit))
    with torch.no_grad():
        model.module.head.weight.zero_()
        model.module.head.bias.copy_(torch.arange(10) == 9)
    save(model, tmp_path / "nine" / "model.safetensors")
    images, labels = np.zeros((30, 32, 32, 3), np.uint8), np.zeros(30, np.int64)  # a fifth is the test part
    np.savez(tmp_path / "zeros.npz", images=images, labels=labels)
    written = attack(
        [str(tmp_path / "nine")], data=str(tmp_path / "zeros.npz"), choices=AttackChoices(attacks=("pgd",), steps=2),
        model_options=ModelOptions(), options=RunOptions(device="cpu", quiet=True, out=tmp_path / "run"),
    )  # fmt: skip
    text = written.read_text()
    assert "nine is wrong on every one of the 6 images: there is nothing to attack" in text
    assert "could not be checked" in text


def test_what_cannot_be_attacked_is_refused(tmp_path, tiny_vit, pictures):
    models, out = [str(tiny_vit)], tmp_path / "run"
    with pytest.raises(UnknownNameError, match="no attack 'pdg'; did you mean 'pgd'"):
        run(out, models, AttackChoices(attacks=("pdg",)))
    for choices, says in (
        (AttackChoices(epsilons=(-1.0,)), "--epsilon from 0 to 255, in 1/255, found -1"),
        (AttackChoices(epsilons=(300.0,)), "found 300"),
        (AttackChoices(epsilons_l2=(-0.5,)), "--epsilon-l2 of at least 0"),
        (AttackChoices(steps=0), "--steps of at least 1, found 0"),
        (AttackChoices(restarts=0), "--restarts of at least 1"),
        (AttackChoices(attacks=("pgd",), epsilons=(0.0,)), "a number above 0 for pgd"),
        (AttackChoices(attacks=("cw", "patch"), downwards=True), "several epsilons, found cw, patch; leave it out"),
        (AttackChoices(attacks=("pgd",), epsilons=(0.0, 4.0), downwards=True), "several epsilons, found pgd"),
        (AttackChoices(attacks=()), "--attack with at least one of"),
        (AttackChoices(baseline="x"), "model for --baseline"),
        (AttackChoices(attacks=("patch",), patch_side=33), "a patch of 1 to 32 px, found 33"),
    ):
        with pytest.raises(InputError, match=says):
            run(out, models, choices)
    with pytest.raises(DataError, match="add --predicted"):
        run(out, models, AttackChoices(), images=[str(pictures)])
    assert not out.exists()


def test_of_images_that_come_class_by_class_some_of_each_are_looked_at():
    rows = torch.arange(100) * 3
    assert spread(rows, 4).tolist() == [0, 75, 150, 225]
    assert spread(rows[:4], 4).tolist() == spread(rows[:4], 9).tolist() == [0, 3, 6, 9]
    for most in range(1, 100):
        found = spread(rows, most)
        assert len(found.unique()) == most
        assert set(found.diff().tolist()) <= {3 * (100 // most), 3 * (100 // most + 1)}

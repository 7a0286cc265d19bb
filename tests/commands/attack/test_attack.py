"""`vitlens attack`: records and reports, resumed runs, several processes, refusals."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.backing import unbacked
from tests.simulated_processes import run_in_processes
from vitlens.analysis.robustness.curve import Outcome
from vitlens.commands.attack.measure import checks as checks_module
from vitlens.commands.attack.measure import measure
from vitlens.commands.attack.measure import sweep as sweep_module
from vitlens.commands.attack.measure.sample import evenly_spaced
from vitlens.commands.attack.measure.sweep import ModelAttack, SweptAttack
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import (
    ATTACKED,
    BLOCKS,
    BY_CLASS,
    CHECKS,
    CORRUPTION_KINDS,
    CURVES,
    EXAMPLES,
    IMAGES,
    ROBUST_PAIRS,
    SAMPLE,
    SHIFTS,
    TRANSFER,
)
from vitlens.commands.attack.record.rows import TransferRow
from vitlens.commands.attack.report import report
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.publish import read
from vitlens.errors import DataError, InputError
from vitlens.files import read_run
from vitlens.models.loading import load
from vitlens.models.saved import save
from vitlens.records import Record
from vitlens.uncertainty import Estimate

FEW = AttackOptions(
    (), attacks=("fgsm", "pgd", "cw"), epsilons=(0.0, 4.0, 32.0), epsilons_l2=(0.5, 2.0), steps=3, predicted=True,
    corruptions=False, inside=False,
)  # fmt: skip


def run(out: Path, models: list[str], options: AttackOptions = FEW, **more: Any) -> Path | None:
    resume, images = more.pop("resume", None), more.pop("images", ())
    settings = {"out": None if resume else out, "limit": 4, "batch_size": 2, **more}
    given = replace(
        options,
        models=tuple(models),
        data=None if images else "digits",
        images=tuple(images),
        resume=resume,
        run=RunOptions(device="cpu", quiet=True, command="vitlens attack a b", **settings),
    )
    return measure(given)


def recorded(folder: Path) -> Record:
    return read(read_run(folder))


@pytest.fixture(scope="module", autouse=True)
def _checked_on_few() -> Iterator[None]:
    """The self-checks attack an image about a hundred times: two images are enough here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks_module, "CHECKED", 2)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled pair, attacked with its predictions as labels, with all measurements."""
    out = tmp_path_factory.mktemp("attack") / "run"
    run(out, ["vit-digits", "cnn-digits"], replace(FEW, inside=True))
    return out


def test_the_record_is_complete(folder):
    record = recorded(folder)
    assert record.status == "done"
    assert not (folder / "progress").exists()
    for alias in ("vit-digits", "cnn-digits"):
        assert record.metric(f"accuracy/{alias}").value == 1  # its own predictions
        for name in ("fgsm-linf/4", "pgd-linf/32", "cw-l2/0.5", "pgd-linf/0"):
            estimate = record.metric(f"robust_accuracy/{alias}/{name}")
            assert estimate.n == 4
            assert estimate.low <= estimate.value <= estimate.high
    assert "robust_difference/vit-digits/cnn-digits/pgd-linf/4" in record.metrics
    assert len(record.rows(CURVES)) == 2 * (3 + 3 + 3)
    assert len(record.rows(TRANSFER)) == 4
    assert all((row.low is None) == (row.rate is None) for row in record.rows(TRANSFER))
    pairs = record.rows(ROBUST_PAIRS)
    assert [row.attack for row in pairs].count("clean") == 1
    assert ("pgd-linf", 32.0) in {(row.attack, row.epsilon) for row in pairs}
    assert (record.config.data.size, record.config.data.classes) == ((32, 32), 10)


def test_one_attack_at_one_epsilon_alone(tmp_path):
    options = replace(FEW, attacks=("fgsm", "low-frequency"), single_epsilons={"low-frequency": 32.0}, transfer=False)
    run(tmp_path / "run", ["cnn-digits"], replace(options, self_checks="few"))
    record = recorded(tmp_path / "run")
    assert [(row.attack, row.epsilon) for row in record.rows(CURVES)] == [
        *(("fgsm-linf", epsilon) for epsilon in (0.0, 4.0, 32.0)),
        *(("low-frequency-linf", epsilon) for epsilon in (0.0, 32.0)),
    ]
    assert record.options(AttackOptions).linf_of("low-frequency") == (32 / 255,)
    report(record)


def test_the_sample_is_attacked_where_the_curve_fell(folder):
    """An image that withstood the attack up to the sample's epsilon counts as not fooled."""
    record = recorded(folder)
    for row in record.rows(SAMPLE):
        (reached,) = (
            each.accuracy
            for each in record.rows(CURVES)
            if (each.model, each.attack, each.epsilon) == (row.model, row.attack, row.epsilon)
        )
        assert 0 < row.fooled <= round((1 - reached) * row.n)


def test_curves_fall_and_are_those_of_the_arrays(folder):
    record = recorded(folder)
    for alias in ("vit-digits", "cnn-digits"):
        arrays = record.arrays(IMAGES, model=alias)
        for attack_name in ("fgsm-linf", "pgd-linf", "cw-l2"):
            rows = [row for row in record.rows(CURVES) if (row.model, row.attack) == (alias, attack_name)]
            values = [row.accuracy for row in rows]
            assert values == sorted(values, reverse=True)
            scale = 255 if attack_name.endswith("linf") else 1
            broken_at = arrays.broken_at[attack_name]
            for row in rows:
                assert row.accuracy == pytest.approx((broken_at * scale > row.epsilon + 1e-3).mean())


def test_what_changes_inside_is_recorded(folder):
    record = recorded(folder)
    assert all(row.fooled for row in record.rows(SAMPLE))
    for name in (
        "vit-digits/spearman/best-for-the-true-class", "vit-digits/spearman/rollout",
        "cnn-digits/spearman/gradcam-for-each-prediction",
    ):  # fmt: skip
        assert f"map_agreement/{name}" in record.metrics
    assert {row.model for row in record.rows(SHIFTS)} == {"vit-digits"}
    assert {row.layer for row in record.rows(SHIFTS)} == set(range(6))
    assert {row.kind for row in record.rows(BLOCKS)} == {"adversarial", "noise", "another image"}
    assert min(row.block for row in record.rows(BLOCKS)) == 0
    assert all(-1 <= row.value <= 1.0001 for row in record.rows(BLOCKS))
    arrays = record.arrays(EXAMPLES, model="vit-digits")
    assert np.abs(arrays.change).max() <= 32 / 255 + 1e-3
    assert arrays.answers.shape == arrays.probability.shape


def test_the_report_has_every_part(folder):
    document = report(recorded(folder))
    assert [figure.name for figure in document.figures] == [  # C&W finds nothing in three steps: no distances
        "curves", "transfer", "examples_vit-digits", "examples_cnn-digits", "paths", "shifts"
    ]  # fmt: skip
    tables = {table.caption.partition(",")[0]: table for section in document.sections for table in section.tables}
    accuracies = tables["Accuracy under attack"]
    assert accuracies.columns == ("attack", "epsilon", "vit-digits", "cnn-digits")
    assert [row[:2] for row in accuracies.rows[:3]] == [("none", "0"), ("FGSM L∞", "4/255"), ("FGSM L∞", "32/255")]
    assert len(accuracies.rows) == 1 + 3 * 2
    assert len(tables["Self-checks"].rows) == len(recorded(folder).rows(CHECKS))
    summary = document.sections[0]
    checks = tuple(row for row in recorded(folder).rows(CHECKS) if row.model == "vit-digits")
    assert any(sentence.rows == checks for sentence in summary.sentences)
    assert list(unbacked(document)) == []


def test_checks_cover_every_attack(folder):
    rows = [row for row in recorded(folder).rows(CHECKS) if row.model == "vit-digits"]
    assert {row.attack for row in rows} >= {"fgsm-linf", "pgd-linf", "cw-l2", "gradients"}
    by_attack = {row.name for row in rows if row.attack == "pgd-linf"}
    of_cw = {row.name: row for row in rows if row.attack == "cw-l2"}
    assert {"no limit", "more steps"} <= of_cw.keys()
    assert of_cw["no limit"].passed is (of_cw["no limit"].found == "none found for 0 of 4")
    assert by_attack == {
        "curve", "gradients read", "epsilon 0", "within the budget", "batch size", "more steps", "no limit"
    }  # fmt: skip
    assert all(row.passed for row in rows if row.name in ("curve", "epsilon 0", "within the budget"))


def same_arrays(one: Path, other: Path, alias: str) -> None:
    first, second = (recorded(folder).arrays(IMAGES, model=alias) for folder in (one, other))
    assert np.array_equal(first.clean, second.clean)
    assert np.array_equal(first.label, second.label)
    for before, after in ((first.broken_at, second.broken_at), (first.distance, second.distance)):
        assert before.keys() == after.keys()
        for name, values in before.items():
            assert np.array_equal(values, after[name]), name


class StoppedError(Exception):
    """Raised in the middle of a sweep."""


def test_a_stopped_run_is_resumed(tmp_path, monkeypatch, tiny_vit):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    models, options = [str(tiny_vit)], replace(FEW, attacks=("fgsm", "noise", "deepfool"), self_checks="few")
    monkeypatch.setattr(sweep_module, "PART_BATCHES", 1)
    run(whole, models, options)
    real, calls = sweep_module.sweep, []

    def stops(*args: object, **more: object) -> object:
        calls.append(more["attacks"])
        if len(calls) == 5:
            raise StoppedError
        return real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(sweep_module, "sweep", stops)
    with pytest.raises(StoppedError):
        run(stopped, models, options)
    assert read_run(stopped).status == "failed"
    assert len(list((stopped / "progress").glob("*.npz"))) == 4
    run(tmp_path / "unused", models, options, resume=stopped)
    assert len(calls) == 5 + (3 * 2 - 4)  # three attacks on two parts, of which four were done
    same_arrays(whole, stopped, "tiny-vit")
    assert not (stopped / "progress").exists()
    assert read_run(stopped).status == "done"


def test_downwards_is_reported_checked_and_not_resumed_upwards(tmp_path, tiny_vit, monkeypatch):
    models, both, real = [str(tiny_vit)], [], checks_module.attempted

    def watched(work: ModelAttack, name: str, rows: torch.Tensor, **more: Any) -> object:
        both.append((name, more["downwards"]))
        return real(work, name, rows, **more)

    monkeypatch.setattr(checks_module, "attempted", watched)
    few = replace(FEW, attacks=("pgd", "deepfool"), steps=2, epsilons=(1.0, 8.0))
    below = replace(few, downwards=True)
    run(tmp_path / "up", models, few)
    run(tmp_path / "down", models, below)
    same_arrays(tmp_path / "up", tmp_path / "down", "tiny-vit")
    costs = [recorded(tmp_path / way).rows(ATTACKED)[0].forwards for way in ("up", "down")]
    assert costs[0] > costs[1] > 0  # an image that stays correct at the largest epsilon is tried at that one only
    assert both == [("pgd", True), ("pgd", False)]
    checks = {(row.name, row.attack): row for row in recorded(tmp_path / "down").rows(CHECKS)}
    assert checks["from below", "pgd-linf"].passed
    assert checks["from below", "pgd-linf"].found.startswith("0 of ")
    assert ("from below", "deepfool-l2") not in checks  # has no epsilons to try
    assert "from below" not in {row.name for row in recorded(tmp_path / "up").rows(CHECKS)}
    with pytest.raises(InputError, match="with its epsilons"):
        run(tmp_path, models, few, resume=tmp_path / "down")


@pytest.mark.parametrize(("name", "images", "steps"), [("pgd", 16, None), ("auto", 6, 2)])
def test_a_slow_attack_is_tried_from_below_on_few_images_with_few_steps(monkeypatch, name, images, steps):
    asked = []

    def tried(_work: object, attack_name: str, rows: torch.Tensor, **more: object) -> object:
        asked.append((attack_name, len(rows), more["steps"]))
        return SimpleNamespace(broken_at={name: torch.full((len(rows),), 0.1 if more["downwards"] else 0.05)})

    monkeypatch.setattr(checks_module, "attempted", tried)
    right, broken_at = torch.ones(16, dtype=torch.bool), torch.full((16,), 0.1)
    outcome = Outcome(f"{name}-linf", "vit", (0.1,), right, broken_at, None)
    swept = SweptAttack(name, outcome, broken_at, ~right, 0, 0, 0.0)
    check = checks_module._from_below(object.__new__(ModelAttack), swept, torch.arange(16))
    assert asked == [(name, images, steps)] * 2
    assert not check.passed
    assert check.found == f"{images} of {images} do"


def test_another_run_cannot_be_resumed(tmp_path, folder):
    models = ["vit-digits", "cnn-digits"]
    with pytest.raises(InputError, match="with its seed"):
        run(tmp_path, models, resume=folder, seed=3)
    with pytest.raises(InputError, match="with its attacks"):
        run(tmp_path, models, replace(FEW, attacks=("pgd",)), resume=folder)


def test_several_processes_give_the_results_of_one(tmp_path, monkeypatch, tiny_vit):
    models = [str(tiny_vit)]
    options = replace(FEW, attacks=("fgsm", "noise"), epsilons=(8.0, 64.0), self_checks="few")
    one = run(tmp_path / "one", models, options)
    reports = run_in_processes(2, lambda processes: run(tmp_path / str(processes.index), models, options), monkeypatch)
    assert reports == [tmp_path / "0" / "report.md", None]
    assert one is not None
    same_arrays(tmp_path / "one", tmp_path / "0", "tiny-vit")


def test_corruptions_and_classes_of_labelled_images(tmp_path):
    options = AttackOptions(
        (), attacks=("fgsm",), epsilons=(2.0, 8.0), inside=False, transfer=False, self_checks="few", baseline="other"
    )
    run(tmp_path / "run", ["cnn-digits", "other=cnn-digits@random"], options, limit=10)
    record = recorded(tmp_path / "run")
    assert record.metric("corruption_accuracy/cnn-digits/noise/1").n == 10
    assert record.metric("mean_corruption_error/other/other").value == pytest.approx(1)
    assert record.metric("mean_corruption_error/cnn-digits/other").value < 1
    assert {row.model for row in record.rows(BY_CLASS)} == {"cnn-digits", "other"}
    assert [len(row.strengths) for row in record.rows(CORRUPTION_KINDS)] == [5] * 7
    assert not record.rows(TRANSFER)
    document = report(record)
    assert [figure.name for figure in document.figures] == ["curves", "distances", "corruptions"]
    (refused,) = [section for section in document.sections if section.title == "Accuracy by class"]
    assert set(record.rows(BY_CLASS)) < set(refused.sentences[0].rows)  # one image of a class is no accuracy


def test_a_model_without_a_correct_image_has_nothing_to_attack(tmp_path, tiny_vit):
    model = load(str(tiny_vit))
    with torch.no_grad():
        model.module.head.weight.zero_()
        model.module.head.bias.copy_(torch.arange(10) == 9)
    save(model, tmp_path / "nine" / "model.safetensors")
    images, labels = np.zeros((30, 32, 32, 3), np.uint8), np.zeros(30, np.int64)  # a fifth is the test part
    np.savez(tmp_path / "zeros.npz", images=images, labels=labels)
    measure(
        AttackOptions(
            (str(tmp_path / "nine"),), str(tmp_path / "zeros.npz"), attacks=("pgd",), steps=2,
            run=RunOptions(device="cpu", quiet=True, out=tmp_path / "run"),
        )
    )  # fmt: skip
    assert {(row.accuracy, row.n) for row in recorded(tmp_path / "run").rows(CURVES)} == {(0.0, 6)}
    assert recorded(tmp_path / "run").rows(CHECKS) == ()


def test_what_cannot_be_attacked_is_refused(tmp_path, tiny_vit, pictures):
    models, out = [str(tiny_vit)], tmp_path / "run"
    for options, message in (
        (AttackOptions((), baseline="x"), "model for --baseline"),
        (AttackOptions((), attacks=("patch",), patch_side=33), "a patch of 1 to 32 px, found 33"),
    ):
        with pytest.raises(InputError, match=message):
            run(out, models, options)
    with pytest.raises(DataError, match="add --predicted"):
        run(out, models, AttackOptions(()), images=[str(pictures)])
    assert not out.exists()


def test_a_pair_without_a_transferable_image_has_no_rate():
    row = TransferRow("a", "b", None, None, None, None, 0.5, 0.5)
    assert row.estimate is None
    assert replace(row, rate=0.5, low=0.2, high=0.8, n=4).estimate == Estimate(0.5, 0.2, 0.8, 4)


def test_images_of_a_sample_are_evenly_spaced():
    rows = torch.arange(100) * 3
    assert evenly_spaced(rows, 4).tolist() == [0, 75, 150, 225]
    assert evenly_spaced(rows[:4], 4).tolist() == evenly_spaced(rows[:4], 9).tolist() == [0, 3, 6, 9]
    for most in range(1, 100):
        chosen = evenly_spaced(rows, most)
        assert len(chosen.unique()) == most
        assert set(chosen.diff().tolist()) <= {3 * (100 // most), 3 * (100 // most + 1)}

"""`vitlens attack`: the record against its arrays, resumed runs, several processes, refusals."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.first_page import judged, states
from tests.kit.making import save
from tests.kit.simulated_processes import run_in_processes
from vitlens import load
from vitlens.commands.attack import sweep as sweep_module
from vitlens.commands.attack.measure import measure, with_noise
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import AttackRecord
from vitlens.commands.attack.report import REPORT
from vitlens.commands.attack.sweep import ModelAttack
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.errors import DataError, InputError
from vitlens.record import read_run

PAIR = ("vit-digits", "cnn-digits")
FEW = AttackOptions(
    (), attacks=("fgsm", "pgd", "cw"), epsilons=(0.0, 4.0, 32.0), epsilons_l2=(0.5, 2.0), steps=3, predicted=True,
    corruptions=False, inside=False,
)  # fmt: skip


def run(out: Path, models: list[str], options: AttackOptions = FEW, **more: Any) -> Path | None:
    resume, images = more.pop("resume", None), tuple(map(str, more.pop("images", ())))
    own = RunOptions(device="cpu", quiet=True, **{"out": None if resume else out, "limit": 4, "batch_size": 2, **more})
    data = None if images else options.data or "digits"
    return measure(replace(options, models=tuple(models), data=data, images=images, resume=resume, run=own))


def recorded(folder: Path) -> AttackRecord:
    record = read_folder(folder)
    assert isinstance(record, AttackRecord)
    return record


@pytest.fixture(scope="module", autouse=True)
def _checked_on_few() -> Iterator[None]:
    """The self-checks attack an image about a hundred times: two images are enough here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_module, "CHECKED", 2)
        yield


@pytest.fixture(scope="module")
def folder(golden) -> Path:
    """The bundled pair, attacked with its predictions as labels, with all measurements."""
    return golden("attack").folder


def test_numbers_are_those_of_the_arrays(folder):
    record = recorded(folder)
    assert vitlens.read(folder).table("curves") == list(record.curves)
    assert not (folder / "progress").exists()

    def robust(model: str, attack: str, epsilon: float) -> np.ndarray:
        scale = 255 if attack.endswith("linf") else 1
        return record.attacked[model].broken_at[attack] * scale > epsilon + 1e-3

    assert len(record.curves) == 2 * (3 + 3 + 3)
    for row in record.curves:
        name = f"robust_accuracy/{row.model}/{row.attack}/{row.epsilon:g}"
        assert record.metric(name).value == pytest.approx(robust(row.model, row.attack, row.epsilon).mean())
        assert (row.accuracy.n, row.epsilon or row.accuracy.value) == (4, row.epsilon or 1)  # its own predictions
    for row in record.pairs:
        first, second = (
            robust(model, "pgd-linf" if row.attack == "clean" else row.attack, row.epsilon) for model in PAIR
        )
        assert (row.only_first, row.only_second) == ((first & ~second).sum(), (second & ~first).sum())
        assert row.difference.value == pytest.approx(100 * (first.mean() - second.mean()))
        assert row.p <= row.p_holm <= 1
    assert [row.attack for row in record.pairs].count("clean") == 1
    for row in record.attacks:
        values = record.attacked[row.model].broken_at[row.attack]
        assert (row.right, row.broken) == ((values > 0).sum(), (np.isfinite(values) & (values > 0)).sum())


def test_the_sample_is_attacked_where_the_curve_fell(folder):
    """An image that withstood the attack up to the sample's epsilon counts as not fooled."""
    record = recorded(folder)
    for row in record.overall:
        (reached,) = [
            each for each in record.curves if each.model == row.model and f"{each.title} at {each.at}" == row.sample
        ]
        assert 0 < row.fooled <= round((1 - reached.accuracy.value) * 4)
    fooled = {row.model: row.fooled for row in record.overall}
    for row in record.transfer:
        if row.made_for == row.shown_to:
            assert row.rate.value == 1
            assert row.accuracy.value == pytest.approx(1 - fooled[row.made_for] / 4)


def test_what_changes_inside_is_recorded(folder):
    record = recorded(folder)
    for name in (
        "vit-digits/spearman/best-for-the-true-class", "vit-digits/spearman/rollout",
        "cnn-digits/top/gradcam-for-each-prediction",
    ):  # fmt: skip
        assert f"map_agreement/{name}" in record.metrics
    assert all(0 <= row.distance.low <= row.distance.value <= 2 for row in record.blocks)
    for row in record.overall:  # the first block at which the attack changes half as much as another image
        own = {(each.kind, each.block): each.distance.value for each in record.blocks if each.model == row.model}
        halfway = [
            block
            for kind, block in own
            if kind == "noise" and 2 * own["adversarial", block] >= own["another image", block]
        ]
        assert (None if row.halfway is None else row.halfway.value) == min(halfway, default=None)
    arrays = record.examples["vit-digits"]
    assert np.abs(arrays.change).max() <= 32 / 255 + 1e-3
    assert 0 <= arrays.before.min() < arrays.before.max()


def test_checks_cover_every_attack_and_nothing_is_claimed_of_four_images(folder):
    rows = [row for row in recorded(folder).checks if row.model == "vit-digits"]
    (of_cw,) = [row for row in rows if (row.name, row.attack) == ("no limit", "cw-l2")]
    assert (of_cw.state != "failed") is (of_cw.found == "none found for 0 of 4")
    assert {row.name for row in rows if row.attack == "pgd-linf"} == {
        "curve", "gradients read", "epsilon 0", "within the budget", "batch size", "more steps", "no limit"
    }  # fmt: skip
    assert all(row.state != "failed" for row in rows if row.name in ("curve", "epsilon 0", "within the budget"))
    document = REPORT(recorded(folder))
    assert not document.first.answer
    assert {each.state for each in judged(document) if each.question == "robustness"} <= {"inconclusive"}


def test_few_checks_are_three_a_model_and_look_at_the_strongest_attack(tiny_vit, tmp_path):
    options, found = replace(FEW, attacks=("fgsm", "pgd"), epsilons=(1.0, 4.0), steps={"pgd": 3}, predicted=False), {}
    for kind in ("few", "all"):
        run(tmp_path / kind, [str(tiny_vit)], replace(options, self_checks=kind, transfer=False), limit=12)
        found[kind] = {(row.name, row.attack): row for row in recorded(tmp_path / kind).checks}
    assert {name for name, _ in found["few"]} == {"gradients", "more steps", "one step against many"}
    assert all("pgd" in attack for name, attack in found["few"] if name != "gradients")
    assert found["few"].items() <= found["all"].items()  # the same checks with the same outcomes


def same_arrays(one: Path, other: Path) -> None:
    first, second = (recorded(folder).attacked["tiny-vit"] for folder in (one, other))
    np.testing.assert_equal(asdict(second), asdict(first))


def test_a_stopped_run_is_resumed_and_no_other(tmp_path, monkeypatch, tiny_vit):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    models, options = [str(tiny_vit)], replace(FEW, attacks=("fgsm", "noise", "deepfool"), self_checks="few")
    monkeypatch.setattr(sweep_module, "PART_BATCHES", 1)
    run(whole, models, options)
    real, calls = sweep_module.sweep, []

    def stops(*args: object, **more: object) -> object:
        calls.append(more["attack"])
        if len(calls) == 5:
            raise ZeroDivisionError
        return real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(sweep_module, "sweep", stops)
    with pytest.raises(ZeroDivisionError):
        run(stopped, models, options)
    assert read_run(stopped).status == "failed"
    for changes, message in (({"seed": 3}, "its seed"), ({"options": FEW}, "its attacks")):
        with pytest.raises(InputError, match=f"with {message}"):
            run(tmp_path, models, **{"options": options, "resume": stopped, **changes})
    assert len(list((stopped / "progress").glob("*.npz"))) == 4
    run(tmp_path / "unused", models, options, resume=stopped)
    assert len(calls) == 5 + (3 * 2 - 4)  # three attacks on two parts, of which four were done
    same_arrays(whole, stopped)
    assert not (stopped / "progress").exists()
    first, second = recorded(whole), recorded(stopped)
    assert (second.status, second.metrics) == ("done", first.metrics)


def test_downwards_is_reported_checked_and_not_resumed_upwards(tmp_path, tiny_vit, monkeypatch):
    models, both, real = [str(tiny_vit)], [], sweep_module.attempted

    def watched(work: ModelAttack, name: str, rows: torch.Tensor, **more: Any) -> object:
        both.append((name, len(rows), more["downwards"]))
        return real(work, name, rows, **more)

    few = replace(FEW, attacks=("pgd", "deepfool"), steps=2, epsilons=(1.0, 8.0))
    run(tmp_path / "up", models, few)
    monkeypatch.setattr(sweep_module, "attempted", watched)
    run(tmp_path / "down", models, replace(few, downwards=True))
    same_arrays(tmp_path / "up", tmp_path / "down")
    up, down = (recorded(tmp_path / way) for way in ("up", "down"))
    assert up.attacks[0].forwards > down.attacks[0].forwards > 0  # what stays correct at the largest epsilon is done
    assert both == [("pgd", 4, True), ("deepfool", 4, True), ("pgd", 2, True), ("pgd", 2, False)]  # all, then checked
    (check,) = [row for row in down.checks if row.name == "from below"]  # deepfool has no epsilons to try
    assert check.attack == "pgd-linf"
    assert check.found.startswith("0 of ")
    assert any("--downwards" in each.text for each in REPORT(down).first.unknown)
    with pytest.raises(InputError, match="with its epsilons"):
        run(tmp_path, models, few, resume=tmp_path / "down")


def test_one_attack_at_one_epsilon_alone_in_several_processes(tmp_path, monkeypatch, tiny_vit):
    models, singles = [str(tiny_vit)], {"low-frequency": 64.0}
    options = replace(FEW, attacks=("fgsm", "low-frequency"), single_epsilons=singles, self_checks="few")
    one = run(tmp_path / "one", models, options)
    reports = run_in_processes(2, lambda processes: run(tmp_path / str(processes.index), models, options), monkeypatch)
    assert reports == [tmp_path / "0" / "report.md", None]
    assert one is not None
    same_arrays(tmp_path / "one", tmp_path / "0")
    assert [(row.attack, row.epsilon) for row in recorded(tmp_path / "one").curves] == [
        *(("fgsm-linf", epsilon) for epsilon in (0.0, 4.0, 32.0)),
        *(("low-frequency-linf", epsilon) for epsilon in (0.0, 64.0)),
    ]


def test_corruptions_of_labelled_images(tmp_path):
    options = AttackOptions(
        (), attacks=("fgsm",), epsilons=(2.0, 8.0), inside=False, transfer=False, self_checks="few", baseline="other"
    )
    run(tmp_path / "run", ["cnn-digits", "other=cnn-digits@random"], options, limit=24)
    record = recorded(tmp_path / "run")
    assert record.metric("mean_corruption_error/other/other").value == pytest.approx(1)
    assert record.metric("mean_corruption_error/cnn-digits/other").value < 1
    for row in record.overall:
        own = [each.accuracy.value for each in record.corruptions if each.model == row.model]
        assert len(own) == 7 * 5
        assert row.mean_error.value == pytest.approx(1 - np.mean(own))
        assert row.lost.value == pytest.approx(100 * (row.clean.value - np.mean(own)))
    assert not record.transfer
    document = REPORT(record)
    assert states(document)["common corruptions of cnn-digits"] in ("pass", "warn", "fail")
    assert states(document)["common corruptions of other"] == "inconclusive"  # at chance: nothing to lose
    assert [figure.name for figure in document.figures] == ["curves", "pairs", "corruptions"]


def test_a_model_without_a_correct_image_has_nothing_to_attack(tmp_path, tiny_vit):
    model = load(str(tiny_vit))
    with torch.no_grad():
        model.module.head.weight.zero_()
        model.module.head.bias.copy_(torch.arange(10) == 9)
    save(model, tmp_path / "nine" / "model.safetensors")
    images, labels = np.zeros((30, 32, 32, 3), np.uint8), np.zeros(30, np.int64)  # a fifth is the test part
    np.savez(tmp_path / "zeros.npz", images=images, labels=labels)
    options = AttackOptions((), str(tmp_path / "zeros.npz"), attacks=("pgd",), steps=2)
    run(tmp_path / "run", [str(tmp_path / "nine")], options, limit=None)
    record = recorded(tmp_path / "run")
    assert {(row.accuracy.value, row.accuracy.n) for row in record.curves} == {(0.0, 6)}
    assert record.checks == ()
    assert set(states(REPORT(record)).values()) == {"inconclusive"}


def test_what_cannot_be_attacked_is_refused(tmp_path, tiny_vit, pictures):
    for error, images, options, message in (
        (InputError, (), AttackOptions((), baseline="x"), "model for --baseline"),
        (InputError, (), AttackOptions((), attacks=("patch",), patch_side=33), "a patch of 1 to 32 px, found 33"),
        (DataError, (pictures,), AttackOptions(()), "add --predicted"),
    ):
        with pytest.raises(error, match=message):
            run(tmp_path / "run", [str(tiny_vit)], options, images=images)
    assert not (tmp_path / "run").exists()


def test_one_image_without_a_label(tmp_path, tiny_vit, pictures):
    options = replace(FEW, attacks=("fgsm",), epsilons=(1.0, 200.0), inside=True)
    run(tmp_path / "run", [str(tiny_vit)], options, images=[pictures / "0.png"], limit=None)
    assert recorded(tmp_path / "run").curves[0].accuracy.value == 1  # of its own prediction


def test_noise_has_the_norm_of_the_perturbation():
    clean = torch.full((3, 3, 8, 8), 0.5)
    changed = clean + 0.05 * torch.rand(clean.shape, generator=torch.Generator().manual_seed(0))
    change = changed - clean
    noise = {norm: with_noise(clean, changed, norm, seed=0) - clean for norm in ("linf", "l2")}
    torch.testing.assert_close(noise["linf"].flatten(1).abs().amax(1), change.flatten(1).abs().amax(1))
    torch.testing.assert_close(noise["l2"].flatten(1).norm(dim=1), change.flatten(1).norm(dim=1))

"""Evaluation leaves out images of the training, which are recognised by content."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from tests.kit.commands import ran, refusal
from vitlens.cli.main import run
from vitlens.commands.report.report import compared_runs

TINY = "train vit-micro --dim 8 --depth 1 --heads 2 --patch-size 8"
EACH = 15  # images of each of two classes


def painted(folder: Path, *, seed: int) -> Path:
    """Write a folder of two class folders in which all images differ."""
    draws = np.random.default_rng(seed)
    for name in ("green", "red"):
        (folder / name).mkdir(parents=True)
        for index in range(EACH):
            Image.fromarray(draws.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(
                folder / name / f"{index}.png"
            )
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write pictures/ (training data of run/), others/ (never seen) and moved/.

    moved/ has the pictures under other names and some others.
    """
    root = tmp_path_factory.mktemp("unseen")
    painted(root / "pictures", seed=0)
    painted(root / "others", seed=1)
    painted(root / "moved", seed=2)
    for index, file in enumerate(sorted((root / "pictures").rglob("*.png"))):
        shutil.copy(file, root / "moved" / file.parent.name / f"copy-{index}.png")
    ran(root / "run", f"{TINY} --data {root / 'pictures'} --epochs 2")
    return root


def evaluated(out: Path, model: Path, data: Path) -> Any:
    """Evaluate with another seed than the training's: held-out images are recognised by content."""
    return ran(out, f"evaluate {model} --data {data} --seed 7")


def files(record: Any) -> set[str]:
    """Return the images of the predictions, as green/1.png."""
    return {"/".join(Path(row.image).parts[-2:]) for row in record.predictions}


@pytest.fixture(scope="module")
def held_out(place: Path) -> set[str]:
    answers = files(ran(place / "held", f"predict {place / 'run'} --data {place / 'pictures'}"))
    assert len(answers) == 6
    return answers


@pytest.mark.parametrize(("data", "count"), [("pictures", 6), ("others", 30), ("moved", 36)])
def test_of_the_training_folder_what_was_held_out_wherever_it_lies(place, tmp_path, data, count):
    record = evaluated(tmp_path / "out", place / "run", place / data)
    assert record.config.data.images == record.metric("accuracy/run").n == count


def test_a_command_without_labels_leaves_out_the_same_but_for_weights_from_elsewhere(
    place, tmp_path, capsys
):
    out = tmp_path / "out"
    data = place / "pictures"
    line = f"stats {place / 'run'} --data {data} --seed 7 --out {out} --device cpu"
    assert run(line.split()) == 0
    data = json.loads((out / "config.json").read_text())["data"]
    assert data["images"] == 6
    assert data["notes"][0] in capsys.readouterr().err
    text = (out / "report.md").read_text()
    assert data["notes"][0][1:] in text
    assert "6 images of" in text
    record = ran(tmp_path / "all", f"predict vit-digits --data {place / 'pictures'}")
    assert len(files(record)) == 30


def test_images_that_were_all_trained_on_are_said_to_be_no_test(place, held_out, tmp_path):
    shutil.copytree(place / "pictures", tmp_path / "seen")
    for name in held_out:
        (tmp_path / "seen" / name).unlink()
    record = evaluated(tmp_path / "out", place / "run", tmp_path / "seen")
    assert record.config.data.images == 24
    assert "not a test accuracy" in record.config.data.notes[0]


@pytest.mark.parametrize("order", ["{run} vit-digits", "vit-digits {run}"])
def test_models_beside_each_other_answer_the_same_unseen_images(place, held_out, tmp_path, order):
    """Both models leave out the same images."""
    line = (
        f"explain {order.format(run=place / 'run')} --data {place / 'pictures'} --method "
        "saliency --seed 7"
    )
    drawn = ran(tmp_path / "both", line).shown
    for model in ("run", "vit-digits"):
        names = [Path(row.image.split(": ")[-1]).name for row in drawn if row.model == model]
        assert sorted(names) == sorted(Path(name).name for name in held_out)


def test_the_bank_of_features_and_the_usual_batches_are_of_what_was_trained_on(place, tmp_path):
    line = (
        f"features {place / 'run'} --data {place / 'pictures'} --k 1 --no-probe --no-tsne "
        "--no-cache --seed 5"
    )
    (row,) = ran(tmp_path / "out", line).sets
    assert (row.test, row.bank) == (6, 24)
    results = json.loads((place / "run" / "results.json").read_text())["tables"]
    (row,) = results["setup"]
    assert (row["batch_size"], row["usual_batch_size"], row["test"]) == (8, 256, 6)
    assert row["learning_rate"] == pytest.approx(row["usual_learning_rate"] / 32**0.5, rel=1e-3)
    text = (place / "run" / "report.md").read_text()
    assert "24 images" in text
    assert "batches of 8" in text
    assert results["history"][-1]["step"] == 2 * (24 // 8)


def test_a_run_that_knows_nothing_of_its_images_holds_out_as_it_did(place, held_out, tmp_path):
    old = Path(shutil.copytree(place / "run", tmp_path / "old"))
    (old / "arrays" / "training_images.npz").unlink()
    record = ran(tmp_path / "out", f"predict {old} --data {place / 'pictures'} --seed 9")
    assert files(record) == held_out  # with the seed of its training, not with this one
    assert "not known" in record.config.data.notes[0]


def test_what_a_start_was_trained_on_is_remembered(place, tmp_path):
    ran(tmp_path / "further", f"train {place / 'run'} --data {place / 'others'} --epochs 1")
    for data in ("others", "pictures"):
        record = evaluated(tmp_path / data, tmp_path / "further", place / data)
        assert record.config.data.images == 6


def test_arrays_are_known_by_their_pixels(tmp_path):
    draws = np.random.default_rng(3)
    images = draws.integers(0, 255, (20, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(20) % 2
    order = draws.permutation(20)
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    np.savez(tmp_path / "b.npz", images=images[order], labels=labels[order])
    ran(tmp_path / "run", f"{TINY} --data {tmp_path / 'a.npz'} --epochs 1")
    seen = []
    for name in ("a", "b"):
        record = ran(
            tmp_path / name, f"predict {tmp_path / 'run'} --data {tmp_path / f'{name}.npz'}"
        )
        seen.append(sorted(int(pixels.sum()) for pixels in record.images_drawn.pixels))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 4


def test_attention_before_and_after_a_training_is_of_the_same_images_and_compared_head_by_head(
    place, tmp_path
):
    """The model that was trained first, as it leaves out more images; the other is given its images
    in its order.
    """
    data = place / "pictures"
    after = ran(tmp_path / "after", f"attention {place / 'run'} --data {data} --limit 5")
    line = f"attention {place / 'run'}@random --data {data} --same-as {after.folder} --seed 3"
    before = ran(tmp_path / "before", line)
    assert before.shown == after.shown
    assert before.config.fingerprints == after.config.fingerprints
    again = ran(tmp_path / "again", line.replace(f" --data {data}", ""))
    assert (again.shown, again.options["data"]) == (before.shown, str(data))
    runs = compared_runs(before, after, "")
    assert runs.same_images == "the same"
    paired = {row.metric: row for row in runs.changes if row.test == "paired"}
    assert set(paired) == {
        f"{word}/run/L0.H{head}"
        for word in ("map_information", "prefix_attention")
        for head in range(2)
    }
    was = before.by_image.information[1].astype(float)
    now = after.by_image.information[1].astype(float)
    change = paired["map_information/run/L0.H1"]
    assert change.difference.value == pytest.approx((now - was).mean())
    assert change.p == pytest.approx(stats.ttest_rel(now, was).pvalue)


def test_attention_refuses_images_that_are_not_there(place, golden, tmp_path, capsys):
    line = f"attention vit-digits --data {place / 'pictures'}"
    original = ran(tmp_path / "whole", line)
    same = f"--same-as {original.folder}"
    assert str(original.folder) in refusal(
        capsys, f"attention {place / 'run'} --data {place / 'pictures'} {same} --quiet"
    )
    assert "--limit" in refusal(capsys, f"{line} {same} --limit 3")
    assert "stats" in refusal(capsys, f"{line} --same-as {golden('stats').folder}")


@pytest.fixture(scope="module")
def old_runs(place: Path) -> tuple[Path, Path]:
    """Return two trainings on pictures/ with seeds 0 and 1, of which the images are not known."""
    ran(place / "other", f"{TINY} --data {place / 'pictures'} --epochs 1 --seed 1")
    old = []
    for name in ("run", "other"):
        folder = Path(shutil.copytree(place / name, place / f"old-{name}"))
        (folder / "arrays" / "training_images.npz").unlink()
        old.append(folder)
    return old[0], old[1]


def test_two_unknown_trainings_are_evaluated_on_what_both_held_out(place, old_runs, tmp_path):
    parts = []
    for name, model in zip("ab", old_runs):
        line = f"predict {model} --data {place / 'pictures'}"
        parts.append(files(ran(tmp_path / name, line)))
    both = parts[0] & parts[1]
    assert both not in (set(), parts[0])
    line = f"evaluate {old_runs[0]} {old_runs[1]} --data {place / 'pictures'}"
    assert ran(tmp_path / "both", line).config.data.images == len(both)


def test_an_unknown_training_does_not_hide_what_another_was_trained_on(place, old_runs, tmp_path):
    line = f"evaluate {old_runs[1]} {place / 'run'} --data {place / 'pictures'}"
    alone = {}
    for name, model in (("unknown", old_runs[1]), ("known", place / "run")):
        answers = ran(tmp_path / name, f"predict {model} --data {place / 'pictures'}")
        alone[name] = files(answers)
    record = ran(tmp_path / "both", line)
    assert record.config.data.images == len(alone["unknown"] & alone["known"])


def test_training_on_from_an_unknown_training_stays_unknown(place, old_runs, tmp_path):
    ran(tmp_path / "further", f"train {old_runs[0]} --data {place / 'others'} --epochs 1")
    record = evaluated(tmp_path / "out", tmp_path / "further", place / "pictures")
    assert record.config.data.images == 6
    assert "not known" in record.config.data.notes[0]

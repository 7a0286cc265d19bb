"""Data given for evaluation is evaluated whole, but for what the model was trained on, which is known by content."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.training_runs import train
from vitlens.cli.main import run
from vitlens.commands.features.images import load_sets
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.run.load import load_split, load_splits
from vitlens.commands.run.options import RunOptions

OPTIONS = RunOptions(device="cpu", quiet=True)
TINY = {"dim": 8, "depth": 1, "heads": 2, "patch_size": [8, 8]}
EACH = 15  # images of each of two classes


def painted(folder: Path, *, seed: int) -> Path:
    """A folder of two class folders, every image another one."""
    draws = np.random.default_rng(seed)
    for name in ("green", "red"):
        (folder / name).mkdir(parents=True)
        for index in range(EACH):
            Image.fromarray(draws.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pictures/ (trained on by run/), others/ (never seen), moved/ (the pictures under other names and some others)."""
    root = tmp_path_factory.mktemp("unseen")
    painted(root / "pictures", seed=0)
    painted(root / "others", seed=1)
    painted(root / "moved", seed=2)
    for index, file in enumerate(sorted((root / "pictures").rglob("*.png"))):
        shutil.copy(file, root / "moved" / file.parent.name / f"copy-{index}.png")
    train(
        "vit-micro", data=str(root / "pictures"), shape=TINY, recipe={"epochs": 2},
        options=replace(OPTIONS, out=root / "run"),
    )  # fmt: skip
    return root


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("data", "count"), [("pictures", 6), ("others", 30), ("moved", 36)])
def test_of_the_training_folder_what_was_held_out_wherever_it_lies(place, data, count):
    model = vitlens.load(str(place / "run"))
    # another seed than the training's: what was held out is known by content
    assert len(load_split(model, options=replace(OPTIONS, seed=7), data=str(place / data))) == count


@pytest.mark.parametrize(("word", "data", "count"), [("evaluate", "others", 30), ("stats", "pictures", 6)])
def test_a_test_folder_is_whole_and_the_training_folder_is_not(place, tmp_path, capsys, word, data, count):
    out = tmp_path / "out"
    arguments = [word, str(place / "run"), "--data", str(place / data), "--seed", "7", "--out", str(out)]
    assert run([*arguments, "--device", "cpu"]) == 0
    data = config(out)["data"]
    assert data["images"] == count
    if word == "evaluate":
        assert json.loads((out / "results.json").read_text())["metrics"]["accuracy/run"]["n"] == count
    assert data["notes"][0] in capsys.readouterr().err
    text = (out / "report.md").read_text()
    assert data["notes"][0][1:] in text
    assert f"{count} images of" in text


def test_images_that_were_all_trained_on_are_said_to_be_no_test(place, tmp_path):
    split = load_split(vitlens.load(str(place / "run")), options=OPTIONS, data=str(place / "pictures"))
    for index, file in enumerate(sorted((place / "pictures").rglob("*.png"))):
        if str(file.relative_to(place / "pictures")) not in set(split.files):
            (tmp_path / "seen" / file.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / "seen" / file.parent.name / f"{index}.png")
    seen = load_split(vitlens.load(str(place / "run")), options=OPTIONS, data=str(tmp_path / "seen"))
    assert len(seen) == 24
    assert "no test accuracy" in seen.notes[0]


def test_models_beside_each_other_answer_the_same_unseen_images(place):
    """What is left out is asked of all models together, also where they take their images alike."""
    trained, foreign = vitlens.load(str(place / "run")), vitlens.load("timm:resnet10t@random", image_size=(32, 32))
    data = str(place / "pictures")
    for pair in ((trained, foreign), (foreign, trained)):
        splits = load_splits(pair, options=OPTIONS, data=data)
        assert [len(split) for split in splits] == [6, 6]
        assert splits[0].files == splits[1].files
    assert len(load_split(foreign, options=OPTIONS, data=data)) == 30
    assert len(load_split(foreign, options=OPTIONS, data=data, beside=(trained,))) == 6


def test_the_bank_of_features_is_what_was_trained_on(place):
    (sets,) = load_sets(
        [vitlens.load(str(place / "run"))],
        FeaturesOptions(("run",), str(place / "pictures"), run=replace(OPTIONS, seed=5)),
    )
    held_out = load_split(vitlens.load(str(place / "run")), options=OPTIONS, data=str(place / "pictures"))
    assert sets.test.files == held_out.files
    assert sets.bank is not None
    assert len(sets.bank) == 24
    assert not set(sets.bank.files or ()) & set(sets.test.files or ())


def test_a_run_that_knows_nothing_of_its_images_holds_out_as_it_did(place, tmp_path):
    old = shutil.copytree(place / "run", tmp_path / "old")
    (old / "arrays" / "training_images.npz").unlink()
    split = load_split(vitlens.load(str(old)), options=replace(OPTIONS, seed=9), data=str(place / "pictures"))
    new = load_split(vitlens.load(str(place / "run")), options=OPTIONS, data=str(place / "pictures"))
    assert split.files == new.files  # with the seed of its training, not with this one
    assert "not known" in split.notes[0]


def test_weights_from_elsewhere_see_the_whole_folder(place):
    for name in ("vit-digits", "timm:resnet10t@random"):
        split = load_split(vitlens.load(name), options=OPTIONS, data=str(place / "pictures"))
        assert len(split) == 30


def test_what_a_start_was_trained_on_is_remembered(place, tmp_path):
    train(
        str(place / "run"), data=str(place / "others"), recipe={"epochs": 1},
        options=replace(OPTIONS, out=tmp_path / "further"),
    )  # fmt: skip
    model = vitlens.load(str(tmp_path / "further"))
    assert len(load_split(model, options=OPTIONS, data=str(place / "others"))) == 6
    assert len(load_split(model, options=OPTIONS, data=str(place / "pictures"))) == 6


def test_arrays_are_known_by_their_pixels(tmp_path):
    draws = np.random.default_rng(3)
    images, labels = draws.integers(0, 255, (20, 8, 8, 3), dtype=np.uint8), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    order = draws.permutation(20)
    np.savez(tmp_path / "b.npz", images=images[order], labels=labels[order])
    train(
        "vit-micro", data=str(tmp_path / "a.npz"), shape=TINY, recipe={"epochs": 1},
        options=replace(OPTIONS, out=tmp_path / "run"),
    )  # fmt: skip
    model = vitlens.load(str(tmp_path / "run"))
    first, second = (load_split(model, options=OPTIONS, data=str(tmp_path / name)) for name in ("a.npz", "b.npz"))
    assert len(first) == len(second) == 4
    pixels = [split.source.read(torch.arange(4)).flatten(1).sum(1).sort().values for split in (first, second)]
    assert torch.equal(*pixels)


def test_ten_epochs_of_few_images_are_more_than_ten_steps(place):
    (row,) = json.loads((place / "run" / "results.json").read_text())["tables"]["setup"]
    assert (row["batch_size"], row["usual_batch_size"], row["test"]) == (8, 256, 6)
    assert row["learning_rate"] == pytest.approx(row["usual_learning_rate"] / 32**0.5, rel=1e-3)
    text = (place / "run" / "report.md").read_text()
    assert "24 images" in text
    assert "batches of 8" in text
    history = json.loads((place / "run" / "results.json").read_text())["tables"]["history"]
    assert history[-1]["step"] == 2 * (24 // 8)

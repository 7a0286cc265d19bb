"""Fine-tuning a trained model: all weights, the last blocks, the head."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.making import digits, untrained
from tests.kit.training_runs import interrupted, train
from vitlens.commands.run.load import load_split
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder, report
from vitlens.commands.train.options import Tuning
from vitlens.errors import InputError

OPTIONS = RunOptions(device="cpu", limit=40, batch_size=10, quiet=True)
SHAPE = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}


def tuned(learned: Path, out: Path, tuning: Tuning = Tuning(), **settings: object) -> Path:  # noqa: B008  frozen
    recipe = {"epochs": 2, **settings.pop("recipe", {})}
    train(str(learned), data="digits", recipe=recipe, tuning=tuning, options=replace(OPTIONS, out=out), **settings)
    return out


def state(folder: Path) -> dict[str, torch.Tensor]:
    return dict(vitlens.load(str(folder)).module.state_dict())


def changed(before: Path, after: Path) -> set[str]:
    one, other = state(before), state(after)
    return {name for name in other if name not in one or not torch.equal(one[name], other[name])}


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_the_head_alone(learned, tmp_path):
    out = tuned(learned, tmp_path / "out", Tuning(freeze=True))
    assert changed(learned, out) == {"head.weight", "head.bias"}
    assert len(vitlens.load(str(out)).classes) == 10
    text = (out / "report.md").read_text()
    (row,) = read_folder(out).started
    assert (row.last, row.trained, row.notes) == (
        0, 170, "replaced the head of 3 classes by one of the data's 10, all zeros"
    )  # fmt: skip
    assert "features computed once" in " ".join(read_folder(out).setup[0].computed)
    assert not (out / "features").exists()
    report(out)
    assert (out / "report.md").read_text() == text


def test_the_last_block(learned, tmp_path):
    out = tuned(learned, tmp_path / "out", Tuning(last=1))
    assert {name.split(".")[0] + "." + name.split(".")[1] for name in changed(learned, out)} == {
        "blocks.1", "norm.weight", "norm.bias", "head.weight", "head.bias",
    }  # fmt: skip
    assert read_folder(out).started[0].last == 1


def test_everything_with_positions_for_another_size(learned, tmp_path):
    out = tuned(learned, tmp_path / "out", image_size=(48, 48), recipe={"epochs": 1})
    model = vitlens.load(str(out))
    assert changed(learned, out) == set(state(learned))
    assert model.input_size == (48, 48)
    assert model.module.get_parameter("pos_embed").shape == (1, 1 + 36, 16)
    (row,) = read_folder(out).started
    assert "resized the position embeddings from 32x32 to 48x48 px" in row.notes


def test_weights_from_a_file(tmp_path):
    shape = {"dim": 128, "depth": 4, "heads": 4}
    torch.save(untrained("vit-mini", classes=("x", "y"), overrides=shape).module.state_dict(), tmp_path / "w.pth")
    options = replace(OPTIONS, out=tmp_path / "out", limit=20)
    train("vit-mini", data="digits", tuning=Tuning(str(tmp_path / "w.pth"), freeze=True), options=options)
    assert read_folder(tmp_path / "out").started[0].weights == "w.pth"


def test_a_stopped_run_goes_on(learned, tmp_path):
    whole = tuned(learned, tmp_path / "whole", Tuning(last=1))
    with interrupted(lambda _, progress: progress.step >= 5):
        tuned(learned, tmp_path / "cut", Tuning(last=1))
    train(None, resume=tmp_path / "cut", options=RunOptions(device="cpu", quiet=True))
    assert (whole / "model.safetensors").read_bytes() == (tmp_path / "cut" / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="with its tuning"):
        train(None, resume=whole, tuning=Tuning(last=2), options=OPTIONS)


def test_a_folder_without_parts_is_divided_and_stays_so(tmp_path):
    """A timm model that was trained here is not tested on what it was trained on."""
    for batch in digits("test").limit(20).batches(1):
        place = tmp_path / "pictures" / "ab"[int(batch.labels[0]) // 5]
        place.mkdir(parents=True, exist_ok=True)
        picture = (batch.images[0] * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(picture).save(place / f"{int(batch.indices[0])}.png")
    options = replace(OPTIONS, out=tmp_path / "out", limit=None)
    pictures = str(tmp_path / "pictures")
    train("timm:resnet10t@random", data=pictures, image_size=(32, 32), recipe={"epochs": 1}, options=options)
    tested = load_split(vitlens.load(str(tmp_path / "out")), options=options, data=pictures)
    untold = load_split(vitlens.load("timm:resnet10t@random", image_size=(32, 32)), options=options, data=pictures)
    assert len(untold) == 20
    assert len(tested) < 10
    assert read_folder(tmp_path / "out").scores[0].accuracy.n == len(tested)
    assert vitlens.load(str(tmp_path / "out")).classes == ("a", "b")


def test_what_cannot_be_is_refused_before_anything_is_written(learned, tmp_path):
    out = tmp_path / "out"
    for says, model, settings in (
        ("--train-last from 1 to 2, the blocks of learned, found 3", str(learned), {"tuning": Tuning(last=3)}),
        ("found --dim for .*; leave it out", str(learned), {"shape": {"dim": 8}}),
        ("'vit-mini': its weights are random", "vit-mini", {"tuning": Tuning(freeze=True)}),
        ("with flip; add --cached-views 4", str(learned), {"tuning": Tuning(freeze=True), "recipe": {"flip": True}}),
    ):
        with pytest.raises(InputError, match=says):
            train(model, data="digits", options=replace(OPTIONS, out=out), **settings)
    assert not out.exists()

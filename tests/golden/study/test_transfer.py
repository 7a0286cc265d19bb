"""A transfer study on tiny folders: its ways do what their names say, its numbers agree, and it can be resumed."""

from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.making import digits
from tests.kit.training_runs import interrupted
from tests.kit.whole_folder import whole_folder
from vitlens import load_data
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.study.kinds import measure as kind_measure
from vitlens.commands.study.kinds.kinds import KINDS
from vitlens.commands.study.kinds.setup import prepare
from vitlens.commands.study.measure import measure
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import StudyRecord
from vitlens.errors import DataError, InputError

OPTIONS = RunOptions(device="cpu", quiet=True, precision="fp32", command="vitlens study tiny --kind transfer")
NAMES = ("zero", "one", "two")


def write_folder(root: Path, counts: dict[str, dict[str, int]]) -> Path:
    """Class folders of the embedded digits: {"train": {"zero": 12 ...}}; a part "" has the class folders at the top."""
    for part, classes in counts.items():
        split = digits("test" if part == "test" else "train")
        assert split.labels is not None
        for number, (name, count) in enumerate(classes.items()):
            place = root / part / name
            place.mkdir(parents=True)
            chosen = (split.labels == number).nonzero().flatten()[:count]
            for index, pixels in enumerate(split.source.read(chosen)):
                Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(place / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("transfer") / "three"
    return write_folder(root, {"train": dict.fromkeys(NAMES, 10), "test": dict.fromkeys(NAMES, 5)})


def transfer(model: str, data: Path, **changes: object) -> Path:
    settings: dict[str, object] = {"kind": "transfer", "epochs": 2, "seeds": 2, "run": OPTIONS, **changes}
    return measure(StudyOptions((model,), str(data), **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def done(tiny_vit: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies") / "transfer"
    assert transfer(str(tiny_vit), data, run=replace(OPTIONS, out=folder)) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def record(done: Path) -> StudyRecord:
    return read_folder(done)


def weights(folder: Path, label: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(vitlens.load(str(folder / "points" / label / f"seed-{seed}")).module.state_dict())


def changed(folder: Path, label: str, start: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in weights(folder, label).items() if not torch.equal(value, start[name])}


def test_every_way_trains_what_its_name_says(done, tiny_vit):
    start = dict(vitlens.load(str(tiny_vit)).module.state_dict())
    heads = {name for name in start if name.startswith("head")}
    start |= {name: torch.zeros_like(value) for name, value in weights(done, "frozen").items() if name in heads}
    assert changed(done, "frozen", start) == heads
    last = changed(done, "last-blocks", start)
    assert not any(name.startswith(("blocks.0", "patch_embed", "pos_embed", "cls_token")) for name in last)
    assert any(name.startswith("blocks.1") for name in last)
    assert any(name.startswith("blocks.0") for name in changed(done, "full", start))
    alone, taught = (weights(done, label) for label in ("scratch", "distilled"))
    for own in (alone, taught):
        assert not np.allclose(own["blocks.0.attn.qkv.weight"], start["blocks.0.attn.qkv.weight"])
    assert any(not torch.equal(alone[name], taught[name]) for name in alone)  # the teacher changes what is learned


def test_accuracies_are_those_of_the_models_and_trained_parameters_and_images_are_as_said(done, data, record):
    split, stored = load_data(str(data), part="test"), record.correct.correct
    points = {row.label: row for row in record.points}
    for place, row in enumerate(record.points):
        assert stored[place].shape == (2, 15)
        assert row.accuracy.value == record.metric(f"accuracy/{row.label}").value == pytest.approx(stored[place].mean())
        if row.candidate:
            model = vitlens.load(str(done / "points" / row.label / "seed-1"))
            assert vitlens.evaluate(model, split).correct.tolist() == stored[place][1].tolist()
    gap = 100 * (points["full"].accuracy.value - points["scratch"].accuracy.value)
    assert record.metric("difference/full/scratch").value == pytest.approx(gap)
    assert points["frozen"].trained == 16 * 3 + 3 < points["last-blocks"].trained < points["full"].trained
    assert points["full"].trained == points["full"].parameters == points["scratch"].trained
    assert points["distilled"].before == points["full"].seconds
    assert [row.epochs for row in record.points[:5]] == [2, 30, 2, 2, 2]
    assert {row.label: row.train_images for row in record.points if not row.candidate} == {
        f"{label}-{share}": images for share, images in ((20, 6), (50, 15)) for label in ("scratch", "frozen", "full")
    }
    last = {(row.label, row.seed): row.accuracy for row in record.curves}
    assert all(
        last[row.label, row.seed] == pytest.approx(row.accuracy) for row in record.trials if "-" not in row.label
    )


def test_attention_moves_only_where_something_was_trained_before_it(record):
    rows = {(row.label, row.layer, row.head): row for row in record.heads_moved}
    assert set(rows) == {
        (label, layer, head) for label in ("last-blocks", "full") for layer in (0, 1) for head in (0, 1)
    }
    assert {rows["last-blocks", 0, head].moved.value for head in (0, 1)} == {0.0}
    assert all(rows["full", layer, head].moved.value > 0 for layer in (0, 1) for head in (0, 1))
    for row in record.moved:
        own = [each for each in rows.values() if each.label == row.label]
        assert row.moved.value == pytest.approx(np.mean([each.moved.value for each in own]))
        assert row.beyond == sum(each.moved.low > each.between for each in own)
        assert record.metric(f"attention_moved/{row.label}") == row.moved


def test_shifts_are_those_of_the_public_statistics(done, data, record, tiny_vit):
    images = load_data(str(data), part="test")
    before, *after = (
        vitlens.statistics(vitlens.load(str(place)), images)
        for place in (tiny_vit, *(done / "points" / "full" / f"seed-{seed}" for seed in (0, 1)))
    )
    assert record.head_shifts
    for row in record.head_shifts:
        values = [float(getattr(table, row.statistic)[row.layer, row.head]) for table in (before, *after)]
        assert row.before == pytest.approx(values[0], rel=1e-5)
        assert row.change.value == pytest.approx(np.mean(values[1:]) - values[0], abs=1e-4)


def test_similarity_is_one_where_nothing_was_trained(record):
    rows = {(row.label, row.layer): row.cka.value for row in record.layer_similarity}
    assert rows["last-blocks", 0] == pytest.approx(1.0, abs=1e-6)
    assert rows["full", 1] < 1
    assert {label for label, _ in rows} == {"last-blocks", "full", "scratch", "distilled"}
    assert [(row.label, row.layer) for row in record.probes] == [
        (label, layer) for label in ("pretrained", "random", "full") for layer in (0, 1)
    ]
    probes = {row.label: row.accuracy.value for row in record.probes if row.layer == 1}
    gain = record.metric("probe_gain/pretrained/random").value
    assert gain == pytest.approx(100 * (probes["pretrained"] - probes["random"]))


def test_maps_show_one_image_of_each_class_with_both_models_own_classes(done, record, tiny_vit):
    stored = record.map_arrays
    assert [row.name for row in record.maps] == sorted(NAMES)
    assert all(row.before in "0123456789" for row in record.maps)  # the digits it was made for
    assert all(row.after in NAMES for row in record.maps)
    pixels = torch.from_numpy(stored.images).float() / 255
    both = (vitlens.load(str(place)) for place in (tiny_vit, done / "points" / "full" / "seed-0"))
    shown = ((stored.before, stored.rollout_before), (stored.after, stored.rollout_after))
    for model, (attention, rolled) in zip(both, shown):
        row = vitlens.attention(model, pixels)[-1][:, :, 0, 1:].mean(1)  # of CLS, mean over heads
        assert np.allclose(attention, row.unflatten(1, (4, 4)), atol=1e-6)
        assert np.allclose(rolled, vitlens.rollout(model, pixels), atol=1e-6)
    assert not np.array_equal(stored.before, stored.after)


def test_a_stopped_study_goes_on_and_finds_the_same(done, tiny_vit, data, tmp_path):
    folder = tmp_path / "stopped"
    with interrupted(lambda training, _: training == 3, kind_measure):
        transfer(str(tiny_vit), data, seeds=1, run=replace(OPTIONS, out=folder))
    first = folder / "points" / "scratch" / "seed-0" / "result.npz"
    earlier = first.stat().st_mtime_ns
    measure(StudyOptions(resume=folder, run=RunOptions(device="cpu", quiet=True, seed=7)))
    assert first.stat().st_mtime_ns == earlier
    for point in KINDS["transfer"].points:
        name = f"points/{point.label}/seed-0/model.safetensors"
        assert (folder / name).read_bytes() == (done / name).read_bytes()
    assert not list((folder / "points").rglob("checkpoint"))
    assert read_folder(folder).moved[1].between is None  # with one seed nothing is known of others


@pytest.mark.parametrize(
    ("counts", "match"),
    [
        ({"": {"zero": 40}}, "at least 2 classes to transfer to, found 1"),
        ({"": {"zero": 5, "one": 5}}, "at least 20 training and 10 test images .* found 8 and 2"),
        ({"train": {"zero": 20, "one": 20}, "test": {"zero": 4, "one": 4}}, "found 40 and 8"),
    ],
)
def test_one_class_or_ten_images_are_refused_before_anything_is_written(tiny_vit, tmp_path, counts, match):
    folder = write_folder(tmp_path / "data", counts)
    with pytest.raises(DataError, match=match):
        transfer(str(tiny_vit), folder, run=replace(OPTIONS, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_wrong_calls_are_refused(tiny_vit, tiny_cnn, data, tmp_path):
    run, vit, given = replace(OPTIONS, out=tmp_path / "out"), str(tiny_vit), str(data)
    calls = {
        "one MODEL with --kind transfer, found none": ((), given, {}),
        "one MODEL with --kind transfer, found a, b": (("a", "b"), given, {}),
        "--data FOLDER or NAME with --kind transfer": ((vit,), None, {}),
        "expected a trained model, found the preset": (("vit-mini",), given, {}),
        "a trained model with --kind": (("vit-mini",), given, {"model_options": ModelOptions(random_weights=True)}),
        "tiny-cnn": ((str(tiny_cnn),), given, {}),
        "expected --data with --kind transfer": ((vit,), None, {"images": ("a.png",)}),
    }
    for says, (models, images, more) in calls.items():
        with pytest.raises(InputError, match=says):
            measure(StudyOptions(models, images, kind="transfer", run=run, **more))
    assert not (tmp_path / "out").exists()


def test_shares_that_leave_a_class_with_one_image_are_left_out(tiny_vit, tmp_path):
    folder = write_folder(tmp_path / "few", {"train": dict.fromkeys(NAMES, 7), "test": dict.fromkeys(NAMES, 4)})
    setup = prepare(StudyOptions((str(tiny_vit),), str(folder), kind="transfer", seeds=1, epochs=1, run=OPTIONS))
    assert {point.share for point in setup.points} == {None, 0.5}  # a fifth of 21 images is 4


def test_the_report_is_made_again_from_a_copy_without_the_models(done, tmp_path):
    whole_folder(copytree(done, tmp_path / "copy", ignore=lambda *_: ["points"]), "study")

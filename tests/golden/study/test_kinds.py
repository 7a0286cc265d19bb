"""`study --kind`: the table of kinds, every point, transfer, results against the trained models, resuming, refusals."""

import json
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
from vitlens.analysis.attention.positions import position_similarity, rank_correlation
from vitlens.analysis.cost.flops import vit_flops
from vitlens.analysis.cost.passes import saved_for_training
from vitlens.cli.main import run
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.study.kinds import measure as kind_measure
from vitlens.commands.study.kinds.kinds import KINDS
from vitlens.commands.study.kinds.setup import Setup, prepare
from vitlens.commands.study.measure import measure
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import StudyRecord
from vitlens.errors import DataError, InputError
from vitlens.lens.trace import probe_images
from vitlens.models.configs import VIT_PRESETS
from vitlens.names import PRESETS
from vitlens.training.metrics import read_metrics

OPTIONS = RunOptions(device="cpu", limit=20, batch_size=10, quiet=True)
FROM_PRESETS = {name: kind for name, kind in KINDS.items() if not kind.adapts}
POINTS = {(p.preset, repr(p.shape)): (name, p) for name, kind in FROM_PRESETS.items() for p in kind.points}


def study(kind: str | None = "pooling", *, options: RunOptions = OPTIONS, **more: object) -> Path:
    settings = {"epochs": 2, "seeds": 2} if kind else {}
    return measure(StudyOptions(kind=kind, run=options, **{**settings, **more}))  # type: ignore[arg-type]


def made(folder: Path, kind: str, **more: object) -> Path:
    study(kind, options=replace(OPTIONS, out=folder), **{"epochs": 1, "seeds": 1, **more})
    return folder


@pytest.fixture(scope="module")
def done(golden) -> Path:
    return golden("study of points").folder


def setup_of(kind: str, images: int, options: RunOptions = OPTIONS, *, epochs: int = 1, data: str = "digits") -> Setup:
    train, test = digits("train").limit(min(images, 40)), digits("test").limit(10)
    train = train.pick(torch.arange(images) % len(train))
    asked = StudyOptions(kind=kind, data=data, epochs=epochs, seeds=1, run=options)
    return Setup(asked, KINDS[kind].points, train, test, torch.device("cpu"))


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_well_formed(name):
    kind = KINDS[name]
    labels = [point.label for point in kind.points]
    assert len(set(labels)) == len(labels) >= 2
    assert len({point.words for point in kind.points}) == len(labels)
    for point in kind.points:
        assert point.preset in (("",) if kind.adapts else PRESETS)
        assert point.label.replace("-", "").isalnum()  # it names a folder
        assert {*point.against, *([point.teacher] if point.teacher else [])} <= set(labels)


def test_each_point_of_the_architecture_differs_in_one_thing_from_the_one_that_it_changes():
    base, kind = VIT_PRESETS["vit-mini"], KINDS["architecture"]
    shapes = {p.label: {n: tuple(v) if isinstance(v, list) else v for n, v in p.shape.items()} for p in kind.points}
    configs = {label: replace(base, **shape) for label, shape in shapes.items()}
    changed = [
        {name for name, value in vars(configs[one]).items() if value != getattr(configs[other], name)}
        for one, other in kind.steps
    ]
    assert changed == [
        {"attention", "mlp", "heads"}, {"heads"}, {"residual"}, {"norm"}, {"mlp"}, {"norm_first"}, {"depth"}, {"depth"},
        {"depth"},
    ]  # fmt: skip
    assert kind.steps[5:7] == (("post-norm", "mlp"), ("depth-2", "mlp"))  # depth builds on the pre-norm block


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, id=f"{kind}-{point.label}", marks=pytest.mark.slow if point.label == "vit-tiny" else ())
        for key, (kind, point) in POINTS.items()
    ],
)
def test_every_point_is_built_and_does_a_step(key, tmp_path):
    point = replace(POINTS[key][1], share=None)
    setup = replace(setup_of("pooling", 10), points=(point,))
    trial = kind_measure.run_trial(replace(setup, path=tmp_path), point, 1, seed=0)
    assert (trial.steps, len(trial.correct)) == (1, 10)
    trained = vitlens.load(str(tmp_path / "points" / point.label / "seed-0"))
    before = dict(setup.begin(point, seed=0).module.named_parameters())
    after = dict(trained.module.named_parameters())
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert trial.parameters == sum(value.numel() for value in before.values())
    if point.preset in VIT_PRESETS:
        shape = {name: tuple(value) if isinstance(value, list) else value for name, value in point.shape.items()}
        assert trial.flops == sum(vit_flops(replace(VIT_PRESETS[point.preset], **shape)).values())


def test_accuracies_are_those_of_the_trained_models(done):
    record = read_folder(done)
    assert (record.status, [row.label for row in record.points]) == ("done", ["cls", "mean"])
    assert [(row.label, row.seed) for row in record.trials] == [("cls", 0), ("cls", 1), ("mean", 0), ("mean", 1)]
    cls, mean = (record.correct.correct[at] for at in (0, 1))
    assert cls.shape == mean.shape == (2, 20)
    assert [row.accuracy.value for row in record.points] == pytest.approx([cls.mean(), mean.mean()])
    assert record.metric("difference/mean/cls").value == pytest.approx(100 * (mean.mean() - cls.mean()))
    for row in record.points:
        model = vitlens.load(str(done / "points" / row.label / "seed-0"))
        assert row.training_bytes == saved_for_training(model, probe_images(model, 2)) // 2
    design = record.design[0]
    assert (design.seeds, design.epochs, design.train_images, design.image_size) == (2, 2, 20, (32, 32))
    assert {row.steps for row in record.points} == {4}
    split, folder = digits("test").limit(20), done / "points" / "mean" / "seed-1"
    right = vitlens.load(str(folder))(split.source.read(torch.arange(20)).float() / 255).argmax(1) == split.labels
    assert mean[1].tolist() == right.tolist()
    left = {path.name for path in folder.iterdir()}
    assert left == {"metrics.jsonl", "model.safetensors", "result.npz"}  # no checkpoint, no second copy of the weights
    assert "](figures/points.png)" in (done / "report.md").read_text()


def test_a_stopped_study_goes_on_and_finds_the_same(done, tmp_path):
    folder = tmp_path / "stopped"
    with interrupted(lambda training, progress: (training, progress.epoch) == (3, 1), kind_measure):
        study(options=replace(OPTIONS, out=folder))
    assert read_folder(folder).status == "interrupted"
    stopped, before = folder / "points" / "mean" / "seed-0", folder / "points" / "cls" / "seed-1" / "result.npz"
    assert read_metrics(stopped)  # an epoch was through
    assert not (stopped / "result.npz").exists()
    (stopped / ".model-0123abcd.safetensors").touch()  # as a kill while writing leaves it
    earlier = before.stat().st_mtime_ns
    study(None, resume=folder, options=RunOptions(device="cpu", quiet=True, seed=7))
    assert before.stat().st_mtime_ns == earlier
    assert not list(folder.rglob(".*"))
    for name in ("arrays/correct.npz", "points/mean/seed-0/model.safetensors"):
        assert (folder / name).read_bytes() == (done / name).read_bytes()
    assert read_folder(folder).metrics == read_folder(done).metrics
    trained = {path: path.stat().st_mtime_ns for path in folder.glob("points/*/*/*")}
    assert study(None, resume=folder, options=OPTIONS) == folder / "report.html"
    assert {path: path.stat().st_mtime_ns for path in trained} == trained  # a whole study is not trained again


def test_shares_are_of_the_data_and_steps_are_equal():
    setup = setup_of("data", 40, epochs=2)
    point = next(point for point in setup.points if point.label == "vit-25")
    images = setup.images(point, seed=0)
    assert (len(images), setup.images_of(point), len(set(images.labels.tolist()))) == (40, 10, 10)


@pytest.mark.parametrize(
    ("images", "batch_size", "expected"),
    [
        (10_000, None, {"vit": (128, 1.414e-3), "cnn": (128, 3e-3)}),  # the CNN's own size: the ViT's recipe has 256
        (10_000, 64, {"vit": (64, 2e-3), "cnn": (64, 3e-3)}),  # of the user: the learning rates stay
        (200, None, {"vit": (16, 5e-4), "cnn": (16, 1.061e-3)}),  # 10 steps an epoch, from 256 and from 128
    ],
)
def test_all_points_have_one_batch_size_though_their_presets_differ(images, batch_size, expected):
    setup = setup_of("swin", images, replace(OPTIONS, batch_size=batch_size), epochs=8, data="elsewhere")
    recipes = {point.label: setup.recipe(point) for point in setup.points}
    assert {recipe.batch_size for recipe in recipes.values()} == {expected["vit"][0]}
    for label, (size, rate) in expected.items():
        assert (recipes[label].batch_size, recipes[label].learning_rate) == (size, pytest.approx(rate, rel=1e-3))
    assert recipes["swin"] == recipes["swin-no-shift"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "poolin"}, "did you mean 'pooling'"),
        ({"epochs": 0}, "--epochs at least 1"),
        ({"data": "digts"}, "did you mean 'digits'"),
        ({"model_options": ModelOptions(weights=Path("w.pth"))}, "no --weights with --kind pooling"),
        ({"kind": "patch-size", "model_options": ModelOptions(image_size=(36, 36))}, "found 36 and 8 px"),
        ({"kind": "data"}, "an image of each of 10 classes in 5%"),
        ({"models": ("vit-tiny",)}, "no MODEL with --kind pooling"),
        ({"kind": None, "seeds": 2}, "--kind with --seeds 2"),
    ],
)
def test_wrong_calls_are_refused_before_anything_is_written(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        study(options=replace(OPTIONS, out=tmp_path / "out"), **changes)
    assert not (tmp_path / "out").exists()


def test_no_seed_is_refused(tmp_path, capsys):
    assert run(["study", "--kind", "pooling", "--seeds", "0", "--out", str(tmp_path / "out")]) == 2
    assert "--seeds" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_study_and_results_about_other_images_are_not_resumed(done, tmp_path):
    config = json.loads((done / "config.json").read_text())
    recipes = {name: {**recipe, "batch_size": 7} for name, recipe in config["recipes"].items()}
    for name, own in (("points", {"points": config["points"][:1]}), ("recipes", {"recipes": recipes})):
        RunFolder.opened("study", RunOptions(out=tmp_path / name), {**config, **own})
    RunFolder.opened("study", RunOptions(out=tmp_path / "whole"), {"options": {}})
    other = copytree(done, tmp_path / "other")
    config["options"]["run"]["limit"] = 10
    (other / "config.json").write_text(json.dumps(config))
    for changes, says in (
        ({"resume": done, "options": replace(OPTIONS, out=tmp_path / "out")}, "found both"),
        ({"resume": done, "kind": "size"}, "with its kind, pooling, found size; leave it out"),
        ({"resume": done, "epochs": 5}, "with its epochs, 2, found 5; leave it out"),
        ({"resume": tmp_path}, "expected the folder of a run"),
        ({"resume": tmp_path / "whole", "kind": None}, "folder of vitlens study --kind to resume"),
        ({"resume": tmp_path / "points"}, "expected the points that the run began with"),
        ({"resume": tmp_path / "recipes"}, "expected the recipes that the run began with"),
        ({"resume": other, "kind": None, "options": RunOptions(device="cpu", quiet=True)},
         r"expected the 20 test images of .* found 10"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            study(**changes)


def test_position_embeddings_of_every_training_are_measured(tmp_path):
    folder = made(tmp_path / "positions", "positions", seeds=2)
    record = read_folder(folder)
    assert [row.label for row in record.position_order] == ["sine", "sine-2d", "learned"]
    for row in record.position_order:
        models = [vitlens.load(str(folder / "points" / row.label / f"seed-{seed}")) for seed in (0, 1)]
        found = [rank_correlation(position_similarity(model), model.layout) for model in models]
        expected = np.mean(np.array(found), 0)
        assert (row.all.value, row.rows.value, row.columns.value) == pytest.approx(expected)
        assert (row.before == row.all.value) == (row.label != "learned")
        assert (row.all.low is None) == (row.label != "learned")  # fixed ones are those of every seed
    assert record.metric("positions/learned/rank_correlation/all") == record.position_order[2].all
    stored = record.position_similarity.similarity
    assert sorted(stored) == [1, 2, 3]
    first = vitlens.load(str(folder / "points" / "learned" / "seed-0"))
    np.testing.assert_allclose(stored[3], position_similarity(first), atol=1e-6)
    assert "](figures/position_similarity.png)" in (folder / "report.md").read_text()


def test_the_image_that_is_cut_is_the_first_of_the_test_images(golden):
    run = golden("study along an axis")
    record = run.record
    image = digits("test").limit(20).source.read(torch.arange(1)).numpy()
    assert np.array_equal(record.cut.image, image)
    assert [(row.tokens, row.grid, row.patch) for row in record.points] == [
        (1 + side * side, (side, side), (32 // side, 32 // side)) for side in (8, 4, 2)
    ]
    assert (run.folder / "figures" / "cuts.png").is_file()


@pytest.mark.slow
def test_the_kind_of_windows_compares_equal_sizes_and_shows_how_far_they_see(tmp_path):
    record = read_folder(made(tmp_path / "swin", "swin"))
    points = {row.label: row for row in record.points}
    assert list(points) == ["vit", "swin", "swin-no-shift", "cnn"]
    parameters = [row.parameters for row in points.values()]
    assert max(parameters) < 1.04 * min(parameters)
    assert points["swin"].flops == points["swin-no-shift"].flops
    seen = {label: [row.seen for row in record.receptive_fields if row.model == label] for label in points}
    assert seen["vit"] == [1.0] * 4
    assert seen["swin"][:2] == [8 * 8 / 32**2, 16 * 16 / 32**2]
    assert seen["swin-no-shift"][:2] == [8 * 8 / 32**2] * 2


# --- a trained model adapted to other data, on tiny folders: its ways do what their names say, its numbers agree

ADAPTING = RunOptions(device="cpu", quiet=True, precision="fp32", command="vitlens study tiny --kind transfer")
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
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("transfer") / "three"
    return write_folder(root, {"train": dict.fromkeys(NAMES, 10), "test": dict.fromkeys(NAMES, 5)})


def transfer(model: str, data: Path, **changes: object) -> Path:
    settings: dict[str, object] = {"kind": "transfer", "epochs": 2, "seeds": 2, "run": ADAPTING, **changes}
    return measure(StudyOptions((model,), str(data), **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def adapted(tiny_vit: Path, three: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies") / "transfer"
    assert transfer(str(tiny_vit), three, run=replace(ADAPTING, out=folder)) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def found(adapted: Path) -> StudyRecord:
    return read_folder(adapted)


def weights(folder: Path, label: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(vitlens.load(str(folder / "points" / label / f"seed-{seed}")).module.state_dict())


def changed(folder: Path, label: str, start: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in weights(folder, label).items() if not torch.equal(value, start[name])}


def test_every_way_trains_what_its_name_says(adapted, tiny_vit):
    start = dict(vitlens.load(str(tiny_vit)).module.state_dict())
    heads = {name for name in start if name.startswith("head")}
    start |= {name: torch.zeros_like(value) for name, value in weights(adapted, "frozen").items() if name in heads}
    assert changed(adapted, "frozen", start) == heads
    last = changed(adapted, "last-blocks", start)
    assert not any(name.startswith(("blocks.0", "patch_embed", "pos_embed", "cls_token")) for name in last)
    assert any(name.startswith("blocks.1") for name in last)
    assert any(name.startswith("blocks.0") for name in changed(adapted, "full", start))
    alone, taught = (weights(adapted, label) for label in ("scratch", "distilled"))
    for own in (alone, taught):
        assert not np.allclose(own["blocks.0.attn.qkv.weight"], start["blocks.0.attn.qkv.weight"])
    assert any(not torch.equal(alone[name], taught[name]) for name in alone)  # the teacher changes what is learned


def test_accuracies_of_a_transfer_are_those_of_the_models_and_sizes_are_as_said(adapted, three, found):
    split, stored = load_data(str(three), part="test"), found.correct.correct
    points = {row.label: row for row in found.points}
    for place, row in enumerate(found.points):
        assert stored[place].shape == (2, 15)
        assert row.accuracy.value == found.metric(f"accuracy/{row.label}").value == pytest.approx(stored[place].mean())
        if row.candidate:
            model = vitlens.load(str(adapted / "points" / row.label / "seed-1"))
            assert vitlens.evaluate(model, split).correct.tolist() == stored[place][1].tolist()
    gap = 100 * (points["full"].accuracy.value - points["scratch"].accuracy.value)
    assert found.metric("difference/full/scratch").value == pytest.approx(gap)
    assert points["frozen"].trained == 16 * 3 + 3 < points["last-blocks"].trained < points["full"].trained
    assert points["full"].trained == points["full"].parameters == points["scratch"].trained
    assert points["distilled"].before == points["full"].seconds
    assert [row.epochs for row in found.points[:5]] == [2, 30, 2, 2, 2]
    assert {row.label: row.train_images for row in found.points if not row.candidate} == {
        f"{label}-{share}": images for share, images in ((20, 6), (50, 15)) for label in ("scratch", "frozen", "full")
    }
    last = {(row.label, row.seed): row.accuracy for row in found.curves}
    assert all(last[row.label, row.seed] == pytest.approx(row.accuracy) for row in found.trials if "-" not in row.label)


def test_attention_moves_only_where_something_was_trained_before_it(found):
    rows = {(row.label, row.layer, row.head): row for row in found.heads_moved}
    assert set(rows) == {
        (label, layer, head) for label in ("last-blocks", "full") for layer in (0, 1) for head in (0, 1)
    }
    assert {rows["last-blocks", 0, head].moved.value for head in (0, 1)} == {0.0}
    assert all(rows["full", layer, head].moved.value > 0 for layer in (0, 1) for head in (0, 1))
    for row in found.moved:
        own = [each for each in rows.values() if each.label == row.label]
        assert row.moved.value == pytest.approx(np.mean([each.moved.value for each in own]))
        assert row.beyond == sum(each.moved.low > each.between for each in own)
        assert found.metric(f"attention_moved/{row.label}") == row.moved


def test_shifts_are_those_of_the_public_statistics(adapted, three, found, tiny_vit):
    images = load_data(str(three), part="test")
    before, *after = (
        vitlens.statistics(vitlens.load(str(place)), images)
        for place in (tiny_vit, *(adapted / "points" / "full" / f"seed-{seed}" for seed in (0, 1)))
    )
    assert found.head_shifts
    for row in found.head_shifts:
        values = [float(getattr(table, row.statistic)[row.layer, row.head]) for table in (before, *after)]
        assert row.before == pytest.approx(values[0], rel=1e-5)
        assert row.change.value == pytest.approx(np.mean(values[1:]) - values[0], abs=1e-4)


def test_similarity_is_one_where_nothing_was_trained(found):
    rows = {(row.label, row.layer): row.cka.value for row in found.layer_similarity}
    assert rows["last-blocks", 0] == pytest.approx(1.0, abs=1e-6)
    assert rows["full", 1] < 1
    assert {label for label, _ in rows} == {"last-blocks", "full", "scratch", "distilled"}
    assert [(row.label, row.layer) for row in found.probes] == [
        (label, layer) for label in ("pretrained", "random", "full") for layer in (0, 1)
    ]
    probes = {row.label: row.accuracy.value for row in found.probes if row.layer == 1}
    gain = found.metric("probe_gain/pretrained/random").value
    assert gain == pytest.approx(100 * (probes["pretrained"] - probes["random"]))


def test_maps_show_one_image_of_each_class_with_both_models_own_classes(adapted, found, tiny_vit):
    stored = found.map_arrays
    assert [row.name for row in found.maps] == sorted(NAMES)
    assert all(row.before in "0123456789" for row in found.maps)  # the digits it was made for
    assert all(row.after in NAMES for row in found.maps)
    pixels = torch.from_numpy(stored.images).float() / 255
    both = (vitlens.load(str(place)) for place in (tiny_vit, adapted / "points" / "full" / "seed-0"))
    shown = ((stored.before, stored.rollout_before), (stored.after, stored.rollout_after))
    for model, (attention, rolled) in zip(both, shown):
        row = vitlens.attention(model, pixels)[-1][:, :, 0, 1:].mean(1)  # of CLS, mean over heads
        assert np.allclose(attention, row.unflatten(1, (4, 4)), atol=1e-6)
        assert np.allclose(rolled, vitlens.rollout(model, pixels), atol=1e-6)
    assert not np.array_equal(stored.before, stored.after)


def test_a_stopped_transfer_goes_on_and_finds_the_same(adapted, tiny_vit, three, tmp_path):
    folder = tmp_path / "stopped"
    with interrupted(lambda training, _: training == 3, kind_measure):
        transfer(str(tiny_vit), three, seeds=1, run=replace(ADAPTING, out=folder))
    first = folder / "points" / "scratch" / "seed-0" / "result.npz"
    earlier = first.stat().st_mtime_ns
    measure(StudyOptions(resume=folder, run=RunOptions(device="cpu", quiet=True, seed=7)))
    assert first.stat().st_mtime_ns == earlier
    for point in KINDS["transfer"].points:
        name = f"points/{point.label}/seed-0/model.safetensors"
        assert (folder / name).read_bytes() == (adapted / name).read_bytes()
    assert not list((folder / "points").rglob("checkpoint"))
    assert read_folder(folder).moved[1].between is None  # with one seed nothing is known of others


UNFIT: dict[str, object] = {
    "one MODEL with --kind transfer, found none": {"models": ()},
    "one MODEL with --kind transfer, found a, b": {"models": ("a", "b")},
    "--data FOLDER or NAME with --kind transfer": {"data": None},
    "expected a trained model, found the preset": {"models": ("vit-mini",)},
    "a trained model with --kind": {"models": ("vit-mini",), "model_options": ModelOptions(random_weights=True)},
    "tiny-cnn": {"models": ("{cnn}",)},
    "expected --data with --kind transfer": {"data": None, "images": ("a.png",)},
    "at least 2 classes to transfer to, found 1": {"data": {"": {"zero": 40}}},
    "at least 20 training and 10 test images .* found 8 and 2": {"data": {"": {"zero": 5, "one": 5}}},
    "found 40 and 8": {"data": {"train": {"zero": 20, "one": 20}, "test": {"zero": 4, "one": 4}}},
}


@pytest.mark.parametrize("says", UNFIT)
def test_a_transfer_that_cannot_be_is_refused_before_anything_is_written(tiny_vit, tiny_cnn, three, tmp_path, says):
    given = {"models": ("{vit}",), "data": str(three), **UNFIT[says]}
    given["models"] = tuple(name.format(vit=tiny_vit, cnn=tiny_cnn) for name in given["models"])
    if isinstance(given["data"], dict):
        given["data"] = str(write_folder(tmp_path / "data", given["data"]))
    with pytest.raises((InputError, DataError), match=says):
        measure(StudyOptions(kind="transfer", run=replace(ADAPTING, out=tmp_path / "out"), **given))
    assert not (tmp_path / "out").exists()


def test_shares_that_leave_a_class_with_one_image_are_left_out(tiny_vit, tmp_path):
    folder = write_folder(tmp_path / "few", {"train": dict.fromkeys(NAMES, 7), "test": dict.fromkeys(NAMES, 4)})
    setup = prepare(StudyOptions((str(tiny_vit),), str(folder), kind="transfer", seeds=1, epochs=1, run=ADAPTING))
    assert {point.share for point in setup.points} == {None, 0.5}  # a fifth of 21 images is 4


def test_the_report_is_made_again_from_a_copy_without_the_models(adapted, tmp_path):
    whole_folder(copytree(adapted, tmp_path / "copy", ignore=lambda *_: ["points"]), "study")

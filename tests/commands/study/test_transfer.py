"""A transfer study on tiny folders: its regimes do what their names say, its numbers agree, and it can be resumed."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.backing import unbacked
from vitlens.cli.main import run
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.publish import read
from vitlens.commands.study.measure import measure
from vitlens.commands.study.measure.transfer import training
from vitlens.commands.study.measure.transfer.setup import prepare
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import ACCURACY, CORRECT, DIFFERENCE, TRIALS
from vitlens.commands.study.report import report
from vitlens.commands.study.transfer.record import (
    CLASS_CHANGES,
    CURVES,
    HEAD_CHANGES,
    HEAD_SHIFTS,
    MAP_ARRAYS,
    MAPS,
    MOVED,
    PROBES,
    REGIME_ROWS,
    SHARE_GAPS,
    SHARE_ROWS,
    SIMILARITIES,
    SIMILARITY_ARRAYS,
    TRANSFER,
)
from vitlens.commands.study.transfer.regimes import DISTILLED, FROZEN, FULL, LAST, REGIMES, SCRATCH
from vitlens.data.catalogue import load_data
from vitlens.data.digits import digits
from vitlens.errors import DataError, InputError, ModelError, UnsupportedError
from vitlens.files import read_run
from vitlens.records import Record

OPTIONS = RunOptions(device="cpu", quiet=True, precision="fp32")
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
def record(done: Path) -> Record:
    return read(read_run(done))


def weights(folder: Path, label: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(vitlens.load(str(folder / "points" / label / f"seed-{seed}")).module.state_dict())


def changed(folder: Path, label: str, start: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in weights(folder, label).items() if not torch.equal(value, start[name])}


def test_every_regime_trains_what_its_name_says(done, tiny_vit):
    start = dict(vitlens.load(str(tiny_vit)).module.state_dict())
    heads = {name for name in start if name.startswith("head")}
    start |= {name: torch.zeros_like(value) for name, value in weights(done, FROZEN.label).items() if name in heads}
    assert changed(done, FROZEN.label, start) == heads
    last = changed(done, LAST.label, start)
    assert last
    assert not any(name.startswith(("blocks.0", "patch_embed", "pos_embed", "cls_token")) for name in last)
    assert any(name.startswith("blocks.1") for name in last)
    assert any(name.startswith("blocks.0") for name in changed(done, FULL.label, start))
    for label in (SCRATCH.label, DISTILLED.label):
        assert not np.allclose(weights(done, label)["blocks.0.attn.qkv.weight"], start["blocks.0.attn.qkv.weight"])


def test_the_teacher_changes_what_the_student_learns(done):
    alone, taught = (weights(done, label) for label in (SCRATCH.label, DISTILLED.label))
    assert any(not torch.equal(alone[name], taught[name]) for name in alone)


def test_accuracies_are_those_of_the_predictions_and_of_the_models(done, data, record):
    stored = record.arrays(CORRECT).correct
    split = load_data(str(data), part="test")
    for place, regime in enumerate(REGIMES):
        assert stored[place].shape == (2, 15)
        assert record.metric(ACCURACY(model=regime.label)).value == pytest.approx(stored[place].mean())
        model = vitlens.load(str(done / "points" / regime.label / "seed-1"))
        assert vitlens.evaluate(model, split).correct.tolist() == stored[place][1].tolist()
    gap = record.metric(DIFFERENCE(model=FULL.label, against=SCRATCH.label))
    assert gap.value == pytest.approx(100 * (stored[2].mean() - stored[3].mean()))
    assert {(row.label, row.seed) for row in record.rows(TRIALS)} == {(r.label, s) for r in REGIMES for s in (0, 1)}


def test_curves_end_at_the_accuracies_and_whole_shares_equal_the_regimes(record):
    last = {(row.label, row.seed): row.accuracy for row in record.rows(CURVES)}
    for trial in record.rows(TRIALS):
        assert last[trial.label, trial.seed] == pytest.approx(trial.accuracy)
    whole = {row.label: row for row in record.rows(SHARE_ROWS) if row.share == 1}
    assert set(whole) == {FROZEN.label, FULL.label, SCRATCH.label}
    for label, row in whole.items():
        assert (row.images, row.accuracy) == (30, pytest.approx(record.metric(ACCURACY(model=label)).value))
    assert sorted({row.images for row in record.rows(SHARE_ROWS)}) == [6, 15, 30]
    gaps = {(row.label, row.share): row.gap for row in record.rows(SHARE_GAPS)}
    full = record.metric(DIFFERENCE(model=FULL.label, against=SCRATCH.label))
    assert gaps[FULL.label, 1.0] == pytest.approx(full.value)


def test_the_regimes_have_their_parameters_and_times(record):
    rows = {row.label: row for row in record.rows(REGIME_ROWS)}
    assert rows[FROZEN.label].trained == 16 * 3 + 3
    assert rows[FROZEN.label].trained < rows[LAST.label].trained < rows[FULL.label].trained
    assert rows[FULL.label].trained == rows[FULL.label].parameters == rows[SCRATCH.label].trained
    assert rows[DISTILLED.label].before == rows[FULL.label].seconds
    assert [row.epochs for row in record.rows(REGIME_ROWS)] == [30, 2, 2, 2, 2]


def test_attention_moves_only_where_something_was_trained_before_it(record):
    rows = {(row.label, row.layer, row.head): row for row in record.rows(HEAD_CHANGES)}
    assert set(rows) == {
        (label, layer, head) for label in ("last-blocks", "full") for layer in (0, 1) for head in (0, 1)
    }
    assert {rows[LAST.label, 0, head].moved for head in (0, 1)} == {0.0}
    assert all(rows[FULL.label, layer, head].moved > 0 for layer in (0, 1) for head in (0, 1))
    for row in rows.values():
        assert row.low is not None
        assert row.high is not None
        assert row.low <= row.moved <= row.high
    for label in (LAST.label, FULL.label):
        mean = np.mean([row.moved for row in rows.values() if row.label == label])
        assert record.metric(MOVED(model=label)).value == pytest.approx(mean)
    classes = record.rows(CLASS_CHANGES)
    assert [row.name for row in classes] == sorted(NAMES)
    weighted = sum(row.images * row.moved for row in classes) / sum(row.images for row in classes)
    assert weighted == pytest.approx(record.metric(MOVED(model=FULL.label)).value)


def test_shifts_are_those_of_the_public_statistics(done, data, record, tiny_vit):
    images = load_data(str(data), part="test")
    before, *after = (
        vitlens.statistics(vitlens.load(str(place)), images)
        for place in (tiny_vit, *(done / "points" / "full" / f"seed-{seed}" for seed in (0, 1)))
    )
    for row in record.rows(HEAD_SHIFTS):
        values = [float(getattr(table, row.statistic)[row.layer, row.head]) for table in (before, *after)]
        assert row.before == pytest.approx(values[0], rel=1e-5)
        assert row.change == pytest.approx(np.mean(values[1:]) - values[0], abs=1e-4)


def test_similarity_is_one_where_nothing_was_trained(record):
    pairs = record.arrays(SIMILARITY_ARRAYS).cka
    assert pairs[0][0, 0] == pytest.approx(1.0, abs=1e-6)
    assert {values.shape for values in pairs.values()} == {(2, 2)}
    rows = {(row.label, row.layer): row.cka for row in record.rows(SIMILARITIES)}
    assert rows[LAST.label, 0] == pytest.approx(1.0, abs=1e-6)
    assert rows[FULL.label, 1] < 1
    assert {label for label, _ in rows} == {"last-blocks", "full", "scratch", "distilled"}
    assert {(row.label, row.layer) for row in record.rows(PROBES)} == {
        (label, layer) for label in ("pretrained", "random", "full") for layer in (0, 1)
    }


def test_maps_show_one_image_of_each_class_with_both_models_own_classes(done, data, record, tiny_vit):
    arrays, rows = record.arrays(MAP_ARRAYS), record.rows(MAPS)
    assert [row.name for row in rows] == sorted(NAMES)
    assert all(row.before in "0123456789" for row in rows)  # the digits it was made for
    assert all(row.after in NAMES for row in rows)
    assert arrays.before.shape == arrays.after.shape == (3, 4, 4)
    assert arrays.rollout_before is not None
    pixels = torch.from_numpy(arrays.images).float() / 255
    both = (vitlens.load(str(place)) for place in (tiny_vit, done / "points" / "full" / "seed-0"))
    shown = ((arrays.before, arrays.rollout_before), (arrays.after, arrays.rollout_after))
    for model, (attention, rolled) in zip(both, shown):
        row = vitlens.attention(model, pixels)[-1][:, :, 0, 1:].mean(1)  # of CLS, mean over heads
        assert np.allclose(attention, row.unflatten(1, (4, 4)), atol=1e-6)
        assert np.allclose(rolled, vitlens.rollout(model, pixels), atol=1e-6)
    assert not np.array_equal(arrays.before, arrays.after)
    last = vitlens.attention(vitlens.load(str(done / "points" / "full" / "seed-0")), load_data(str(data), part="test"))
    patches = last[-1][:, :, 0, 1:].mean((0, 1)).unflatten(0, (4, 4))  # the CLS row
    assert np.allclose(arrays.mean_after, patches, atol=1e-6)


def test_every_sentence_is_backed_and_every_figure_there(done, record):
    document = report(record)
    assert not list(unbacked(document))
    assert {path.stem for path in (done / "figures").glob("*.png")} == {figure.name for figure in document.figures}
    (design,) = record.rows(TRANSFER)
    assert (design.train_images, design.test_images, design.classes, design.pretrained) == (30, 15, 3, 10)
    assert [section.title for section in document.sections][-1] == "Recommendation"
    assert json.loads((done / "results.json").read_text())["status"] == "done"


def test_a_stopped_study_goes_on_and_finds_the_same(done, tiny_vit, data, tmp_path, monkeypatch):
    folder, fit, begun = tmp_path / "stopped", training.fit, []

    def interrupted(*args: object, **options: object) -> object:
        begun.append(1)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return fit(*args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(training, "fit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            transfer(str(tiny_vit), data, seeds=1, run=replace(OPTIONS, out=folder))
    earlier = (folder / "points" / "full" / "seed-0" / "result.npz").stat().st_mtime_ns
    measure(StudyOptions(resume=folder, run=RunOptions(device="cpu", quiet=True, seed=7)))
    assert (folder / "points" / "full" / "seed-0" / "result.npz").stat().st_mtime_ns == earlier
    for label in (*(regime.label for regime in REGIMES), "scratch-50"):
        name = f"points/{label}/seed-0/model.safetensors"
        assert (folder / name).read_bytes() == (done / name).read_bytes()
    assert not list((folder / "points").rglob("checkpoint"))
    assert not list(unbacked(report(read(read_run(folder)))))  # also with one seed


def test_resuming_another_study_is_refused(done, tmp_path):
    with pytest.raises(InputError, match="with its epochs, 2, found 5; leave it out"):
        measure(StudyOptions(resume=done, epochs=5, run=OPTIONS))
    with pytest.raises(InputError, match="found both"):
        measure(StudyOptions(resume=done, run=replace(OPTIONS, out=tmp_path / "a")))
    with pytest.raises(InputError, match="folder of vitlens study --kind"):
        measure(StudyOptions(kind="pooling", resume=done, run=OPTIONS))


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


@pytest.mark.parametrize(("name", "says"), [("medmnist:bloodmnist", "found none"), ("eurosat", "or a network")])
def test_a_name_without_network_is_one_line_and_exit_code_2(tiny_vit, tmp_path, capsys, name, says, monkeypatch):
    def no_network(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    line = ["study", str(tiny_vit), "--kind", "transfer", "--data", name, "--data-dir", str(tmp_path / "data")]
    assert run([*line, "--out", str(tmp_path / "out")]) == 2
    (error,) = [text for text in capsys.readouterr().err.splitlines() if text.strip()]
    assert says in error
    assert not (tmp_path / "out").exists()


def test_wrong_calls_are_refused(tiny_vit, tiny_cnn, data, tmp_path):
    run = replace(OPTIONS, out=tmp_path / "out")
    with pytest.raises(InputError, match="expected one MODEL with --kind transfer, found none"):
        measure(StudyOptions(data=str(data), kind="transfer", run=run))
    with pytest.raises(InputError, match="expected one MODEL with --kind transfer, found a, b"):
        measure(StudyOptions(("a", "b"), str(data), kind="transfer", run=run))
    with pytest.raises(InputError, match="expected --data FOLDER or NAME with --kind transfer"):
        measure(StudyOptions((str(tiny_vit),), kind="transfer", run=run))
    with pytest.raises(ModelError, match="expected a trained model, found the preset"):
        transfer("vit-mini", data, run=run)
    with pytest.raises(InputError, match="expected a trained model with --kind transfer"):
        transfer("vit-mini", data, run=run, model_options=ModelOptions(random_weights=True))
    with pytest.raises(UnsupportedError, match="tiny-cnn"):
        transfer(str(tiny_cnn), data, run=run)
    with pytest.raises(InputError, match="--seeds of at least 1"):
        transfer(str(tiny_vit), data, run=run, seeds=0)
    with pytest.raises(InputError, match="expected --data with --kind transfer"):
        measure(StudyOptions((str(tiny_vit),), images=("a.png",), kind="transfer", run=run))
    assert not (tmp_path / "out").exists()


def test_shares_that_leave_a_class_with_one_image_are_left_out(tiny_vit, tmp_path):
    folder = write_folder(tmp_path / "few", {"train": dict.fromkeys(NAMES, 7), "test": dict.fromkeys(NAMES, 4)})
    setup = prepare(StudyOptions((str(tiny_vit),), str(folder), kind="transfer", run=OPTIONS))
    from vitlens.commands.study.measure.transfer.setup import trainings

    assert {share for _, share in trainings(setup)} == {0.5}  # a fifth of 21 images is 4


def test_the_report_is_made_again_from_a_copied_folder(done, tmp_path):
    from vitlens.commands.run.publish import report as publish_again

    copy = tmp_path / "copy"
    copytree(done, copy, ignore=lambda *_: ["points", "figures"])
    publish_again(copy)
    assert (copy / "report.md").read_bytes() == (done / "report.md").read_bytes()

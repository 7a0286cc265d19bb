"""`study --kind transfer`: a trained model adapted to other data in several ways."""

import json
from itertools import product
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.commands import gone_on, ran, refusal
from tests.kit.making import digits
from tests.kit.saving import no_figures
from tests.kit.select import index_by, select, values_of
from tests.kit.training_runs import interrupted
from tests.kit.whole_folder import whole_folder
from vitlens import load_data
from vitlens.commands.study.kinds.transfer.record import TransferRecord

NAMES = ("zero", "one", "two")
LINE = "study {model} --kind transfer --data {data} --epochs 2 --batch-size 15 --precision fp32"


def write_folder(root: Path, **counts: dict[str, int]) -> Path:
    """Write class folders of the embedded digits, as in train={"zero": 12 ...}.

    top: class folders at the top, without a part.
    """
    for part, classes in counts.items():
        split = digits("test" if part == "test" else "train")
        for label, (name, count) in enumerate(classes.items()):
            folder = root / part.removeprefix("top") / name
            folder.mkdir(parents=True)
            chosen = (split.labels == label).nonzero().flatten()[:count]
            for index, pixels in enumerate(split.source.read(chosen)):
                Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("transfer") / "three"
    return write_folder(folder, train=dict.fromkeys(NAMES, 10), test=dict.fromkeys(NAMES, 5))


@pytest.fixture(scope="module")
def record(tiny_vit, three, tmp_path_factory) -> TransferRecord:
    folder = tmp_path_factory.mktemp("studies") / "transfer"
    with no_figures():  # test_the_report_is_made_again draws them
        return ran(folder, f"{LINE.format(model=tiny_vit, data=three)} --seeds 2")


def adapted(record: TransferRecord, label: str, seed: int = 0) -> vitlens.Model:
    return vitlens.load(str(record.folder / "points" / label / f"seed-{seed}"))


def weights_of(model: vitlens.Model) -> dict[str, torch.Tensor]:
    return dict(model.module.state_dict())


def changed_names(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of the weights that differ."""
    return {name for name, value in after.items() if not torch.equal(value, before[name])}


def test_every_way_trains_what_its_name_says(record, tiny_vit):
    start = weights_of(vitlens.load(str(tiny_vit)))
    frozen = weights_of(adapted(record, "frozen"))
    head_names = {name for name in start if name.startswith("head")}
    for name in head_names:
        start[name] = torch.zeros_like(frozen[name])  # the new head begins at zero
    assert changed_names(start, frozen) == head_names

    changed_by_last_blocks = changed_names(start, weights_of(adapted(record, "last-blocks")))
    before_last_blocks = ("blocks.0", "patch_embed", "pos_embed", "cls_token")
    assert not [name for name in changed_by_last_blocks if name.startswith(before_last_blocks)]
    assert "blocks.1.attn.qkv.weight" in changed_by_last_blocks

    name = "blocks.0.attn.qkv.weight"
    assert name in changed_names(start, weights_of(adapted(record, "full")))
    scratch = weights_of(adapted(record, "scratch"))
    distilled = weights_of(adapted(record, "distilled"))
    assert not np.allclose(scratch[name], start[name])
    assert not np.allclose(distilled[name], start[name])
    assert changed_names(scratch, distilled)  # the teacher changes what is learned


def test_accuracies_of_a_transfer_are_those_of_the_models(three, record):
    split = load_data(str(three), part="test")
    stored = record.correct.correct
    points = index_by(record.points, "label")
    for place, row in enumerate(record.points):
        correct = stored[place]
        assert correct.shape == (2, 15)
        assert row.accuracy.value == pytest.approx(correct.mean())
        assert record.metric(f"accuracy/{row.label}").value == row.accuracy.value
        if row.candidate:
            evaluation = vitlens.evaluate(adapted(record, row.label, 1), split)
            assert evaluation.correct.tolist() == correct[1].tolist()
    gap = 100 * (points["full"].accuracy.value - points["scratch"].accuracy.value)
    assert record.metric("difference/full/scratch").value == pytest.approx(gap)


def test_each_way_trains_as_many_weights_images_and_epochs_as_is_said(record):
    points = index_by(record.points, "label")
    assert points["frozen"].trained == 16 * 3 + 3
    assert points["frozen"].trained < points["last-blocks"].trained < points["full"].trained
    assert points["full"].trained == points["full"].parameters == points["scratch"].trained
    assert points["distilled"].before == points["full"].seconds
    assert values_of(record.points[:5], "epochs") == [2, 30, 2, 2, 2]
    images_of_shares = {}
    for row in record.points:
        if not row.candidate:
            images_of_shares[row.label] = row.train_images
    assert images_of_shares == {
        "scratch-20": 6,
        "frozen-20": 6,
        "full-20": 6,
        "scratch-50": 15,
        "frozen-50": 15,
        "full-50": 15,
    }
    # rows of later epochs replace earlier ones
    last_accuracy = {(row.label, row.seed): row.accuracy for row in record.curves}
    for row in record.trials:
        if "-" not in row.label:
            assert last_accuracy[row.label, row.seed] == pytest.approx(row.accuracy)


def test_attention_moves_only_where_something_was_trained_before_it(record):
    rows = index_by(record.heads_moved, "label", "layer", "head")
    assert set(rows) == {*product(("last-blocks", "full"), (0, 1), (0, 1))}
    assert {rows["last-blocks", 0, head].moved.value for head in (0, 1)} == {0.0}
    for row in rows.values():
        if row.label == "full":
            assert row.moved.value > 0
    for row in record.moved:
        heads = select(rows.values(), label=row.label)
        assert row.moved.value == pytest.approx(np.mean(values_of(heads, "moved.value")))
        assert row.beyond == sum(head.moved.low > head.between for head in heads)
        assert record.metric(f"attention_moved/{row.label}") == row.moved


def test_shifts_are_those_of_the_public_statistics(three, record, tiny_vit):
    split = load_data(str(three), part="test")
    before = vitlens.statistics(vitlens.load(str(tiny_vit)), split)
    first = vitlens.statistics(adapted(record, "full", 0), split)
    second = vitlens.statistics(adapted(record, "full", 1), split)
    assert record.head_shifts
    for row in record.head_shifts:
        values = []
        for statistics in (before, first, second):
            of_heads = getattr(statistics, row.statistic)
            values.append(float(of_heads[row.layer, row.head]))
        assert row.before == pytest.approx(values[0], rel=1e-5)
        assert row.change.value == pytest.approx(np.mean(values[1:]) - values[0], abs=1e-4)


def test_similarity_is_one_where_nothing_was_trained(record):
    rows = {(row.label, row.layer): row.cka.value for row in record.layer_similarity}
    assert rows["last-blocks", 0] == pytest.approx(1.0, abs=1e-6)
    assert rows["full", 1] < 1
    assert {label for label, _ in rows} == {"last-blocks", "full", "scratch", "distilled"}
    assert values_of(record.probes, "label", "layer") == [
        *product(("pretrained", "random", "full"), (0, 1))
    ]
    probes = {row.label: row.accuracy.value for row in record.probes if row.layer == 1}
    gain = record.metric("probe_gain/pretrained/random").value
    assert gain == pytest.approx(100 * (probes["pretrained"] - probes["random"]))


def test_maps_show_one_image_of_each_class_with_both_models_own_classes(record, tiny_vit):
    stored = record.map_arrays
    assert values_of(record.maps, "name") == sorted(NAMES)
    for row in record.maps:
        assert row.before in "0123456789"  # the digits it was made for
        assert row.after in NAMES
    pixels = torch.from_numpy(stored.images).float() / 255
    for model, attention, rollout in (
        (vitlens.load(str(tiny_vit)), stored.before, stored.rollout_before),
        (adapted(record, "full"), stored.after, stored.rollout_after),
    ):
        last_weights = vitlens.attention(model, pixels)[-1]
        of_cls = last_weights[:, :, 0, 1:].mean(1)  # mean over heads
        assert np.allclose(attention, of_cls.unflatten(1, (4, 4)), atol=1e-6)
        assert np.allclose(rollout, vitlens.rollout(model, pixels), atol=1e-6)
    assert not np.array_equal(stored.before, stored.after)


def test_a_stopped_transfer_goes_on_and_finds_the_same(record, tiny_vit, three, tmp_path):
    with interrupted(lambda training, _: training == 3, "study"):
        ran(tmp_path / "stopped", f"{LINE.format(model=tiny_vit, data=three)} --seeds 1", code=130)
    points = tmp_path / "stopped" / "points"
    first = points / "scratch" / "seed-0" / "result.npz"
    earlier = first.stat().st_mtime_ns
    again = gone_on(tmp_path / "stopped", "study --seed 7")
    assert first.stat().st_mtime_ns == earlier
    expected_points = record.folder / "points"
    models = list(expected_points.glob("*/seed-0/model.safetensors"))
    assert len(models) == len(again.points)
    for model in models:
        actual = points / model.relative_to(expected_points)
        assert actual.read_bytes() == model.read_bytes()
    assert not list(points.rglob("checkpoint"))
    assert again.moved[1].between is None  # with one seed nothing is known of others


UNFIT = {
    "at least 2 classes to transfer to, found 1": {"top": {"zero": 40}},
    "found 8 and 2": {"top": {"zero": 5, "one": 5}},
    "found 40 and 8": {"train": {"zero": 20, "one": 20}, "test": {"zero": 4, "one": 4}},
}


@pytest.mark.parametrize("says", UNFIT)
def test_data_that_are_too_few_are_refused_before_anything_is_written(
    says, tiny_vit, tmp_path, capsys
):
    data = write_folder(tmp_path / "data", **UNFIT[says])
    line = f"{LINE.format(model=tiny_vit, data=data)} --device cpu --quiet --out {tmp_path / 'out'}"
    assert says in refusal(capsys, line)
    assert not (tmp_path / "out").exists()


def test_shares_that_leave_a_class_with_one_image_are_left_out(tiny_vit, tmp_path):
    data = write_folder(
        tmp_path / "few", train=dict.fromkeys(NAMES, 7), test=dict.fromkeys(NAMES, 4)
    )
    with interrupted(lambda *_: True, "study"):
        ran(tmp_path / "out", f"{LINE.format(model=tiny_vit, data=data)} --seeds 1", code=130)
    points = json.loads((tmp_path / "out" / "config.json").read_text())["points"]
    assert {point["share"] for point in points} == {None, 0.5}  # a fifth of 21 images is 4


def test_the_report_is_made_again_from_a_copy_without_the_models(record, tmp_path):
    whole_folder(copytree(record.folder, tmp_path / "copy", ignore=lambda *_: ["points"]), "study")

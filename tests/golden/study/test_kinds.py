"""`study --kind`: every kind, results against the trained models, resuming."""

import json
from shutil import copytree

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.commands import figures, gone_on, ran, refusal, written_digits
from tests.kit.making import digits
from tests.kit.marks import slow_among
from tests.kit.saving import no_figures
from tests.kit.select import index_by, names_in, select, values_of
from tests.kit.study_kinds import (
    KINDS_WITH_FINDINGS,
    compared_pairs,
    finding_next_to,
    findings_of,
    with_exploding_variant,
)
from tests.kit.training_runs import interrupted
from vitlens.commands.study.kinds.variants.record import VariantsRecord
from vitlens.errors import NonFiniteError

LINE = "study --data digits --limit 20 --batch-size 10"
ENDS = "--device cpu --quiet"
PARTS = ("attention", "residual", "norm", "mlp", "norm_first")  # which a point may leave out


@pytest.fixture(scope="module")
def done(golden) -> VariantsRecord:
    """Return a study of two points, two seeds and two epochs."""
    return golden("study of points").record


def trained(record: VariantsRecord, label: str, seed: int = 0) -> vitlens.Model:
    return vitlens.load(str(record.folder / "points" / label / f"seed-{seed}"))


SLOW = ("data", "size", "swin", "positions", "patch-size", "window", "recipe", "distillation")


def check_architectures(points: list[dict], shapes: dict[str, dict]) -> None:
    """Fail unless each point differs in one thing from the one that it changes.

    points: as in config.json. shapes: the overrides of each model, by label.
    """
    full = {label: {**dict.fromkeys(PARTS, True), **shape} for label, shape in shapes.items()}
    differing = []
    for point in points:
        if point["base"]:
            changed = full[point["label"]]
            base = full[point["base"]]
            differing.append(
                {name for name in {**changed, **base} if changed.get(name) != base.get(name)}
            )
    assert differing == [
        {"attention", "mlp", "heads"},
        {"heads"},
        {"residual"},
        {"norm"},
        {"mlp"},
        {"norm_first"},
        {"depth"},
        {"depth"},
        {"depth"},
        {"norm_first"},
        {"depth"},
        {"norm_first"},
    ]


def check_shares(record: VariantsRecord) -> None:
    """Fail unless each share of 300 images has its images, and fewer steps at equal epochs."""
    points = index_by(record.points, "label")
    held_out = record.design[0].validation_images
    assert 20 <= held_out <= 30
    expected = {}
    for name in ("vit", "cnn"):
        for share in (5, 25, 100):
            expected[f"{name}-{share}"] = round((300 - held_out) * share / 100)
    for label in ("vit-5", "vit-25", "cnn-5", "cnn-25"):
        expected[f"{label}-epochs"] = expected[label]
        assert points[f"{label}-epochs"].steps < points[label].steps
    assert {label: row.train_images for label, row in points.items()} == expected


def check_windows(record: VariantsRecord) -> None:
    """Fail unless models are equally large, and see as far as their windows reach."""
    points = index_by(record.points, "label")
    parameters = values_of(points.values(), "parameters")
    assert max(parameters) < 1.04 * min(parameters)
    assert points["swin"].flops == points["swin-no-shift"].flops
    seen = {}
    for label in points:
        seen[label] = values_of(select(record.receptive_fields, model=label), "seen")
    assert seen["vit"] == [1.0] * 4
    assert seen["swin"][:2] == [8 * 8 / 32**2, 16 * 16 / 32**2]
    assert seen["swin-no-shift"][:2] == [8 * 8 / 32**2] * 2


@pytest.mark.parametrize("kind", slow_among(["architecture", "registers", *SLOW], SLOW))
def test_every_point_of_a_kind_is_built_and_does_a_step(kind, tmp_path):
    limit = "--limit 10"
    if kind in ("data", "distillation"):
        limit = "--limit 300 --batch-size 100"
    record = ran(tmp_path / "out", f"{LINE} --kind {kind} --seeds 1 --epochs 1 {limit}")
    points = index_by(record.points, "label")
    assert len(points) == len(record.points) >= 2
    assert len(set(values_of(record.points, "words"))) == len(points)
    steps = {row.steps for label, row in points.items() if not label.endswith("-epochs")}
    assert len(steps) == 1  # also of shares of the data
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [point["label"] for point in config["points"]] == [*points]
    shapes = {}
    for label, row in points.items():
        model = trained(record, label)
        assert row.parameters == model.parameter_count()
        assert row.flops == sum(vitlens.profile(model, batch_sizes=()).flops.values())
        shapes[label] = model.architecture["overrides"]
    if kind == "architecture":
        check_architectures(config["points"], shapes)
    if kind == "data":
        check_shares(record)
    if kind == "swin":
        check_windows(record)


def test_accuracies_are_those_of_the_trained_models(done):
    assert (done.status, values_of(done.points, "label")) == ("done", ["cls", "mean"])
    assert values_of(done.trials, "label", "seed") == [
        ("cls", 0),
        ("cls", 1),
        ("mean", 0),
        ("mean", 1),
    ]
    cls = done.correct.correct[0]
    mean = done.correct.correct[1]
    assert cls.shape == mean.shape == (2, 20)
    assert values_of(done.points, "accuracy.value") == pytest.approx([cls.mean(), mean.mean()])
    assert done.metric("difference/mean/cls").value == pytest.approx(
        100 * (mean.mean() - cls.mean())
    )
    design = done.design[0]
    assert (design.seeds, design.epochs) == (2, 2)
    assert (design.train_images, design.image_size) == (20, (32, 32))
    assert set(values_of(done.points, "steps")) == {4}
    for row in done.points:
        profile = vitlens.profile(trained(done, row.label), batch_sizes=())
        assert row.training_bytes == profile.training_bytes
    right = vitlens.evaluate(trained(done, "mean", 1), digits("test").limit(20)).correct
    assert mean[1].tolist() == right.tolist()
    left = names_in(done.folder / "points" / "mean" / "seed-1")
    # no checkpoint, no second copy of the weights
    assert left == {"metrics.jsonl", "model.safetensors", "result.npz"}
    assert "points" in figures(done)


def test_a_stopped_study_goes_on_and_finds_the_same(done, tmp_path):
    folder = tmp_path / "stopped"
    with interrupted(lambda training, progress: (training, progress.epoch) == (3, 1), "study"):
        record = ran(folder, f"{LINE} --kind pooling --seeds 2 --epochs 2", code=130)
    assert record.status == "interrupted"
    stopped = folder / "points" / "mean" / "seed-0"
    before = folder / "points" / "cls" / "seed-1" / "result.npz"
    assert (stopped / "metrics.jsonl").read_text().count("\n") == 1  # an epoch was through
    assert not (stopped / "result.npz").exists()
    (stopped / ".model-0123abcd.safetensors").touch()  # as a kill while writing leaves it
    earlier = before.stat().st_mtime_ns
    again = gone_on(folder, "study --seed 7")
    assert before.stat().st_mtime_ns == earlier
    assert not list(folder.rglob(".*"))
    for name in ("arrays/correct.npz", "points/mean/seed-0/model.safetensors"):
        assert (folder / name).read_bytes() == (done.folder / name).read_bytes()
    assert again.metrics == done.metrics
    written = {path: path.stat().st_mtime_ns for path in folder.glob("points/*/*/*")}
    gone_on(folder, LINE)
    # a finished study is not trained again
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.mark.parametrize(
    ("images", "typed", "size", "rates"),
    [
        # the CNN's own size: the ViT's recipe has 256
        (10_000, "", 128, {"vit": 1.414e-3, "cnn": 3e-3}),
        # of the user: the learning rates stay
        (10_000, "--batch-size 64", 64, {"vit": 2e-3, "cnn": 3e-3}),
        # 10 steps an epoch, from 256 and from 128
        (200, "", 16, {"vit": 5e-4, "cnn": 1.061e-3}),
    ],
)
def test_all_points_have_one_batch_size_though_their_presets_differ(
    images, typed, size, rates, tmp_path
):
    count = images * 5 // 4  # a fifth is the test part
    pixels = np.random.default_rng(0).integers(0, 255, (count, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=pixels, labels=np.arange(count) % 10)
    data = tmp_path / "data.npz"
    line = f"study --kind swin --data {data} --image-size 32 --epochs 8 --seeds 1 {typed}"
    with interrupted(lambda *_: True, "study"):
        ran(tmp_path / "out", line, code=130)
    recipes = json.loads((tmp_path / "out" / "config.json").read_text())["recipes"]
    assert {recipe["batch_size"] for recipe in recipes.values()} == {size}
    for label, rate in rates.items():
        assert recipes[label]["learning_rate"] == pytest.approx(rate, rel=1e-3)
    assert recipes["swin"] == recipes["swin-no-shift"]


def test_another_study_and_results_about_other_images_are_not_resumed(done, tmp_path, capsys):
    config = json.loads((done.folder / "config.json").read_text())
    options = config["options"]
    recipes = config["recipes"]
    changes = {
        "whole": {"options": {"run": options["run"]}},
        "points": {"points": config["points"][:1]},
        "recipes": {
            "recipes": {name: {**recipe, "batch_size": 7} for name, recipe in recipes.items()}
        },
        "images": {"options": {**options, "run": {**options["run"], "limit": 10}}},
    }
    for name, other in changes.items():
        copytree(done.folder, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **other}))
    for folder, typed, says in (
        (done.folder, f"--out {tmp_path / 'out'}", "found both"),
        (done.folder, "--kind size", "with its kind, pooling, found size"),
        (done.folder, "--epochs 5", "with its epochs, 2, found 5"),
        (tmp_path / "nothing", "", "expected the folder of a run"),
        (tmp_path / "whole", "", "folder of vitlens study --kind to resume"),
        (tmp_path / "points", "", "the points that the run began with"),
        (tmp_path / "recipes", "", "the recipes that the run began with"),
        (tmp_path / "images", "", "images that the run in"),
    ):
        assert says in refusal(capsys, f"study --resume {folder} {typed} {ENDS}")


@pytest.mark.usefixtures("undrawn")
def test_position_embeddings_of_every_training_are_measured(pictures, tmp_path):
    record = ran(tmp_path / "positions", f"{LINE} --kind positions --seeds 2 --epochs 1 --limit 10")
    rows = index_by(record.position_order, "label")
    assert list(rows) == ["learned", "sine", "sine-2d"]
    for label, seeds in (("sine", (0,)), ("learned", (0, 1))):
        seed_values = []
        for seed in seeds:
            place = record.folder / "points" / label / f"seed-{seed}"
            seen = ran(
                tmp_path / f"{label}-{seed}", f"attention m={place} --images {pictures / '0.png'}"
            )
            metrics = (
                f"positions/m/rank_correlation/{name}" for name in ("all", "rows", "columns")
            )
            seed_values.append([seen.metric(metric).value for metric in metrics])
        values = values_of((rows[label].all, rows[label].rows, rows[label].columns), "value")
        assert values == pytest.approx(np.mean(seed_values, 0), abs=1e-6)
    for label, row in rows.items():
        # fixed: of every seed
        assert (row.before == row.all.value) == (row.all.low is None) == (label != "learned")
    assert record.metric("positions/learned/rank_correlation/all") == rows["learned"].all
    stored = record.position_similarity.similarity
    assert sorted(stored) == [1, 2, 3]
    places = trained(record, "learned").module.get_parameter("pos_embed").detach()[0, 1:]
    unit = torch.nn.functional.normalize(places, dim=1)
    np.testing.assert_allclose(stored[1].reshape(len(unit), -1), unit @ unit.T, atol=1e-5)
    assert "position_similarity" in figures(record)


def test_the_image_that_is_cut_is_the_first_of_the_test_images(golden):
    record = golden("study along an axis").record
    image = digits("test").limit(20).source.read(torch.arange(1)).numpy()
    assert np.array_equal(record.cut.image, image)
    assert values_of(record.points, "tokens", "grid", "patch") == [
        (1 + side * side, (side, side), (32 // side, 32 // side)) for side in (16, 8, 4, 2)
    ]
    assert "cuts" in figures(record)


def test_training_is_followed_on_images_that_it_never_sees(tmp_path):
    line = "study --kind pooling --data digits --limit 120 --batch-size 30 --seeds 1 --epochs 4"
    record = ran(tmp_path / "out", f"{line} {ENDS}")
    design = record.design[0]
    assert design.train_images + design.validation_images == 120
    assert 10 <= design.validation_images <= 12  # one digit of each class, some in two scenes
    rows = select(record.validation, label="mean")
    assert values_of(rows, "epoch") == [1, 2, 3, 4]
    (level,) = select(record.levels, label="mean")
    rise = 100 * (rows[-1].accuracy.value - rows[-2].accuracy.value)
    assert level.rise.value == pytest.approx(rise)
    assert level.levelled == (rise <= 1)


def test_too_few_images_leave_no_validation_part(done):
    assert done.design[0].validation_images == 0
    assert not done.validation
    assert not done.levels


def test_a_training_with_an_infinite_loss_counts_as_failed(monkeypatch, tmp_path):
    with_exploding_variant(monkeypatch)
    # always answering the first class is significantly better than guessing one of two
    labels = np.array([0] * 90 + [1] * 10)
    pixels = np.random.default_rng(0).integers(0, 255, (100, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=pixels, labels=labels)
    line = f"study --kind recipe --data {tmp_path / 'data.npz'} --image-size 32 --batch-size 40"
    record = ran(tmp_path / "out", f"{line} --seeds 2 --epochs 2 {ENDS}")
    points = index_by(record.points, "label")
    assert points["exploding"].failed == 2
    assert points["exploding"].accuracy.value == pytest.approx(0.9)
    assert "2 of **exploding**" in (tmp_path / "out" / "report.md").read_text()


def test_steps_and_speed_are_those_of_the_trainings_that_did_not_fail(tmp_path):
    first_fails = interrupted(lambda number, _: number == 1, "study", error=NonFiniteError)
    with no_figures(), first_fails:
        record = ran(
            tmp_path / "out", f"{LINE} --kind pooling --seeds 2 --epochs 1 --image-size 16"
        )
    failed, other = record.points
    assert (failed.failed, failed.steps) == (2, other.steps)
    of_failed, of_other_seed = select(record.trials, label=failed.label)
    assert of_failed.images_per_second == 0
    assert failed.images_per_second == of_other_seed.images_per_second > 0


def test_a_teacher_is_not_left_out_before_its_students(tmp_path):
    def place(number: int, label: int) -> str:
        part = "test" if number % 2 else "train"
        return f"{part}/{'ab'[label // 5]}/{number}.png"

    # of two classes, with about ten images each
    data = written_digits(tmp_path / "few", 60, place)
    with interrupted(lambda *_: True, "study"):
        line = f"study --kind distillation --data {data} --seeds 2 --epochs 1"
        ran(tmp_path / "out", line, code=130)
    points = json.loads((tmp_path / "out" / "config.json").read_text())["points"]
    labels = {point["label"] for point in points}
    for point in points:
        assert {point["teacher"], *point["against"]} - {""} <= labels


@pytest.mark.parametrize("kind", KINDS_WITH_FINDINGS)
def test_every_result_of_the_literature_is_about_two_compared_variants(kind):
    pairs = compared_pairs(kind)
    for finding in findings_of(kind):
        assert {finding.label, finding.against} in pairs
        assert finding.expects in ("higher", "equal")
        assert not finding.statement.endswith(".")


@pytest.mark.parametrize(
    ("expects", "difference", "p", "detectable", "agreement"),
    [
        ("higher", 5.0, 0.01, 2.0, "agrees"),
        ("higher", -5.0, 0.01, 2.0, "contradicts"),
        ("higher", 5.0, 0.2, 9.0, "undecided"),
        ("equal", 1.0, 0.2, 2.0, "agrees"),
        ("equal", 1.0, 0.2, 9.0, "undecided"),
        ("equal", 5.0, 0.01, 2.0, "contradicts"),
    ],
)
def test_agreement_needs_significance_or_power(expects, difference, p, detectable, agreement):
    measured = {"difference": difference, "p": p, "detectable": detectable}
    assert finding_next_to(expects, **measured).agreement == agreement
    turned = finding_next_to(expects, **measured, reverse=True)
    assert turned.difference.value == -difference

"""`vitlens attack`: the record against its arrays, resumed runs, several processes."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.commands import gone_on, quick_attacks, ran, refusal, report, stopping
from tests.kit.first_page import clear_effects, judged, states
from tests.kit.making import save
from tests.kit.select import index_by, select, select_one, values_of
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.attack.record import AttackRecord
from vitlens.commands.run.publish import read_folder
from vitlens.uncertainty import Estimate, holm

PAIR = ("vit", "cnn-digits")
FEW = "--data digits --limit 4 --batch-size 2 --predicted --steps 3 --no-corruptions --no-inside"
ENDS = "--device cpu --quiet --out"


@pytest.fixture(scope="module", autouse=True)
def _checked_on_few():
    with quick_attacks():
        yield


@pytest.fixture(scope="module")
def record(golden) -> AttackRecord:
    """Attack a sharp ViT and the bundled CNN with predictions as labels, fully measured."""
    return golden("attack").record


def test_numbers_are_those_of_the_arrays(record):
    def robust(model: str, attack: str, epsilon: float) -> np.ndarray:
        scale = 255 if attack.endswith("linf") else 1
        return record.attacked[model].broken_at[attack] * scale > epsilon + 1e-3

    assert len(record.curves) == 2 * (3 + 3 + 3)
    for row in record.curves:
        name = f"robust_accuracy/{row.model}/{row.attack}/{row.epsilon:g}"
        assert record.metric(name).value == pytest.approx(
            robust(row.model, row.attack, row.epsilon).mean()
        )
        # its own predictions
        assert (row.accuracy.n, row.epsilon or row.accuracy.value) == (
            4,
            row.epsilon or 1,
        )
    for row in record.pairs:
        attack = "pgd-linf" if row.attack == "clean" else row.attack
        first, second = (robust(model, attack, row.epsilon) for model in PAIR)
        assert (row.only_first, row.only_second) == (
            (first & ~second).sum(),
            (second & ~first).sum(),
        )
        assert row.difference.value == pytest.approx(100 * (first.mean() - second.mean()))
        assert row.p <= row.p_holm <= 1
    assert values_of(record.pairs, "attack").count("clean") == 1
    for row in record.attacks:
        values = record.attacked[row.model].broken_at[row.attack]
        assert (row.right, row.broken) == (
            (values > 0).sum(),
            (np.isfinite(values) & (values > 0)).sum(),
        )


def test_the_sample_is_attacked_where_the_curve_fell_and_what_changes_inside_is_recorded(record):
    """An image that withstood the attack up to the sample's epsilon counts as not fooled."""
    for row in record.overall:
        of_model = select(record.curves, model=row.model)
        (reached,) = [curve for curve in of_model if f"{curve.title} at {curve.at}" == row.sample]
        assert 0 < row.fooled <= round((1 - reached.accuracy.value) * 4)
    fooled = {row.model: row.fooled for row in record.overall}
    for row in record.transfer:
        if row.made_for == row.shown_to:
            assert row.rate.value == 1
            assert row.accuracy.value == pytest.approx(1 - fooled[row.made_for] / 4)
    names = {name for name in record.metrics if name.startswith("map_agreement")}
    assert names >= {
        f"map_agreement/vit/spearman/{maps}" for maps in ("best-for-each-prediction", "rollout")
    }
    cnn = ("the-true-class", "each-prediction")
    assert names >= {f"map_agreement/cnn-digits/top/gradcam-for-{maps}" for maps in cnn}
    for row in record.blocks:
        assert 0 <= row.distance.low <= row.distance.value <= 2
    # the first block at which the attack changes half as much as another image
    for row in record.overall:
        of_model = {
            (block.kind, block.block): block.distance.value
            for block in record.blocks
            if block.model == row.model
        }
        blocks = [block for kind, block in of_model if kind == "noise"]
        halfway = [
            block
            for block in blocks
            if 2 * of_model["adversarial", block] >= of_model["another image", block]
        ]
        assert (None if row.halfway is None else row.halfway.value) == min(halfway, default=None)
    arrays = record.examples["vit"]
    assert np.abs(arrays.change).max() <= 32 / 255 + 1e-3
    assert 0 <= arrays.before.min() < arrays.before.max()


@pytest.mark.parametrize(
    ("name", "alias", "model"),
    [("attack", "vit", "sharp"), ("attack of predictions", "tiny-vit", "vit")],
)
def test_noise_beside_an_attack_is_as_large_as_its_perturbation(name, alias, model, golden, places):
    record = golden(name).record
    arrays = record.examples[alias]
    draws = np.random.default_rng(0)
    clean = arrays.pixels / 255
    change = arrays.change
    noise = draws.choice((-1, 1), clean.shape) * np.abs(change).max((1, 2, 3), keepdims=True)
    if name == "attack of predictions":  # by PGD in L2
        noise = draws.standard_normal(clean.shape)
        noise *= np.sqrt(
            (change**2).sum((1, 2, 3), keepdims=True) / (noise**2).sum((1, 2, 3), keepdims=True)
        )
    # a pixel that would leave the range takes its noise with the other sign, so none is cut off
    is_outside = (clean + noise < 0) | (clean + noise > 1)
    noisy = np.where(is_outside, clean - noise, clean + noise).clip(0, 1)
    images = torch.from_numpy(np.concatenate([clean, noisy])).float()
    (outputs,) = vitlens.capture(load(str(places[model])), images, ["blocks.1.input"]).values()
    distance = 1 - torch.cosine_similarity(*outputs.flatten(1).chunk(2)).mean().item()
    distances = {
        (row.kind, row.block): row.distance.value for row in record.blocks if row.model == alias
    }
    assert distances["noise", 0] == pytest.approx(distance, rel=0.15)  # of other random numbers


def test_checks_cover_every_attack_and_nothing_is_claimed_of_four_images(record):
    rows = select(record.checks, model="vit")
    of_cw = select_one(rows, name="no limit", attack="cw-l2")
    assert (of_cw.state != "failed") is (of_cw.found == "none found for 0 of 4")
    # cw has none
    assert set(values_of(select(rows, name="epsilon 0"), "attack")) == {
        "fgsm-linf",
        "pgd-linf",
    }
    assert set(values_of(select(rows, attack="pgd-linf"), "name")) == {
        "curve",
        "gradients read",
        "epsilon 0",
        "within the budget",
        "batch size",
        "more steps",
        "no limit",
    }
    for row in rows:
        if row.name in ("curve", "epsilon 0", "within the budget"):
            assert row.state != "failed"
    document = report(record)
    assert not document.first.answer
    assert set(values_of(select(judged(document), question="robustness"), "state")) <= {
        "inconclusive"
    }


def test_few_checks_are_three_a_model_and_look_at_the_strongest_attack(tiny_vit, tmp_path):
    line = (
        f"attack {tiny_vit} --data digits --limit 12 --batch-size 2 --no-corruptions "
        "--no-inside --no-transfer"
    )
    checks_by_kind = {}
    for kind in ("few", "all"):
        typed = f"{line} --attack fgsm,pgd --epsilon 1,4 --steps pgd=3 --self-checks {kind}"
        checks_by_kind[kind] = index_by(ran(tmp_path / kind, typed).checks, "name", "attack")
    assert {name for name, _ in checks_by_kind["few"]} == {
        "gradients",
        "more steps",
        "one step against many",
    }
    for name, attack in checks_by_kind["few"]:
        if name != "gradients":
            assert "pgd" in attack
    # the same checks with the same outcomes
    assert checks_by_kind["few"].items() <= checks_by_kind["all"].items()


def same_arrays(one: AttackRecord, other: AttackRecord) -> None:
    first = one.attacked["tiny-vit"]
    second = other.attacked["tiny-vit"]
    np.testing.assert_equal(asdict(second), asdict(first))


def test_a_stopped_run_is_resumed_and_no_other(tmp_path, tiny_vit, capsys):
    line = f"attack {tiny_vit} {FEW} --epsilon 0,4,32 --self-checks few"
    typed = f"{line} --attack fgsm,noise,deepfool"
    out = tmp_path / "stopped"
    with quick_attacks(part=1):
        uninterrupted = ran(tmp_path / "whole", typed)
        with stopping("attack", at=5):
            assert run(f"{typed} {ENDS} {out}".split()) == 1
        assert read_folder(out).status == "failed"
        assert "its seed" in refusal(
            capsys, f"{typed} --seed 3 --device cpu --quiet --resume {out}"
        )
        assert "its attacks" in refusal(
            capsys, f"{line} --attack fgsm --device cpu --quiet --resume {out}"
        )
        assert len(list((out / "progress").glob("*.npz"))) == 4
        with stopping("attack", at=0) as calls:
            again = gone_on(out, typed)
    assert calls[0] == 3 * 2 - 4  # three attacks on two parts, of which four were done
    same_arrays(uninterrupted, again)
    assert not (out / "progress").exists()
    assert (again.status, again.metrics) == ("done", uninterrupted.metrics)


def test_an_interrupted_run_keeps_its_finished_batches_and_names_the_command_that_resumes(
    tmp_path, tiny_vit, capsys
):
    typed = f"attack mine={tiny_vit} {FEW} --epsilon 0,4,32 --self-checks few --attack fgsm,noise"
    out = tmp_path / "stopped"
    with quick_attacks(part=1):
        uninterrupted = ran(tmp_path / "whole", typed)
        with stopping("attack", at=3, error=KeyboardInterrupt()):
            assert run(f"{typed} {ENDS} {out}".split()) == 130
        said = capsys.readouterr().err
        assert len(list((out / "progress").glob("*.npz"))) == 2
        line = said.partition("continue with vitlens ")[2].split()
        assert line == ["attack", "--resume", str(out)]
        assert "leave it out" in refusal(
            capsys, f"{' '.join(line)} --attack pgd --device cpu --quiet"
        )
        with stopping("attack", at=0) as calls:
            assert run([*line, "--device", "cpu", "--quiet"]) == 0
    assert calls[0] == 2
    again = read_folder(out)
    np.testing.assert_equal(asdict(again.attacked["mine"]), asdict(uninterrupted.attacked["mine"]))
    assert again.metrics == uninterrupted.metrics
    assert "--resume FOLDER" in refusal(capsys, "attack --data digits")


def test_downwards_finds_the_same_with_fewer_passes_and_is_not_resumed_upwards(
    tmp_path, tiny_vit, capsys
):
    line = f"attack {tiny_vit} {FEW} --attack pgd,deepfool --steps 2 --epsilon 1,8"
    up = ran(tmp_path / "up", line)
    down = ran(tmp_path / "down", f"{line} --downwards")
    same_arrays(up, down)
    # what stays correct at the largest epsilon is done
    assert up.attacks[0].forwards > down.attacks[0].forwards > 0
    # deepfool has no epsilons to try
    check = select_one(down.checks, name="from below")
    assert check.attack == "pgd-linf"
    assert check.found.startswith("0 of ")
    assert not select(up.checks, name="from below")
    assert "--downwards" in "\n".join(values_of(report(down).first.unknown, "text"))
    assert "with its epsilons" in refusal(
        capsys, f"{line} --device cpu --quiet --resume {tmp_path / 'down'}"
    )


@pytest.fixture(scope="module")
def corrupted(tmp_path_factory):
    """Return corruptions of a trained and an untrained model."""
    line = (
        "attack cnn-digits other=cnn-digits@random --data digits --limit 24 --attack fgsm "
        "--epsilon 2,8 --no-inside"
    )
    folder = tmp_path_factory.mktemp("corrupted") / "run"
    return ran(folder, f"{line} --no-transfer --self-checks few --baseline other")


def test_differences_under_corruptions_are_paired_and_corrected_together(corrupted):
    rows = corrupted.corruption_pairs
    assert len(rows) == 7 * 5
    assert values_of(rows, "p_holm") == pytest.approx(holm(values_of(rows, "p")))
    accuracies = {
        (row.model, row.kind, row.severity): row.accuracy.value for row in corrupted.corruptions
    }
    for row in rows:
        gap = (
            accuracies[row.first, row.kind, row.severity]
            - accuracies[row.second, row.kind, row.severity]
        )
        assert row.difference.value == pytest.approx(100 * gap)
    most = max(row.difference.value for row in rows if row.p_holm <= 0.05)
    (claim,) = [
        claim for claim in report(corrupted).claims if claim.question.startswith("corruption: ")
    ]
    assert (claim.effect.value, claim.subject) == (most, "cnn-digits and other")


def test_corruptions_of_labelled_images(corrupted):
    record = corrupted
    assert record.metric("mean_corruption_error/other/other").value == pytest.approx(1)
    assert record.metric("mean_corruption_error/cnn-digits/other").value < 1
    for row in record.overall:
        accuracies = values_of(select(record.corruptions, model=row.model), "accuracy.value")
        assert len(accuracies) == 7 * 5
        assert row.mean_error.value == pytest.approx(1 - np.mean(accuracies))
        assert row.lost.value == pytest.approx(100 * (row.clean.value - np.mean(accuracies)))
    assert not record.transfer
    document = report(record)
    assert states(document)["common corruptions of cnn-digits"] in ("pass", "warn", "fail")
    # at chance: nothing to lose
    assert states(document)["common corruptions of other"] == "inconclusive"
    assert values_of(document.figures, "name") == ["curves", "pairs", "corruptions"]


def test_a_loss_that_chance_explains_is_no_cost_of_corruptions(corrupted):
    for low, is_cost in ((-7.2, False), (0.4, True)):
        lost = Estimate(2.2, low, 9.0, 24, "points")
        overall = tuple(replace(row, lost=lost) for row in corrupted.overall)
        claims = report(replace(corrupted, overall=overall)).claims
        claim = select_one(claims, question="common corruptions", subject="cnn-digits")
        assert ("cost" in claim.says) == is_cost


def test_a_model_without_a_correct_image_has_nothing_to_attack(tmp_path, tiny_vit):
    model = load(str(tiny_vit))
    with torch.no_grad():
        model.module.head.weight.zero_()
        model.module.head.bias.copy_(torch.arange(10) == 9)
    save(model, tmp_path / "nine" / "model.safetensors")
    # a fifth is the test part
    images = np.zeros((30, 32, 32, 3), np.uint8)
    labels = np.zeros(30, np.int64)
    np.savez(tmp_path / "zeros.npz", images=images, labels=labels)
    line = (
        f"attack {tmp_path / 'nine'} --data {tmp_path / 'zeros.npz'} --batch-size 2 --attack "
        "pgd --steps 2"
    )
    record = ran(tmp_path / "run", line)
    assert set(values_of(record.curves, "accuracy.value", "accuracy.n")) == {(0.0, 6)}
    assert record.checks == ()
    assert set(states(report(record)).values()) == {"inconclusive"}


def test_one_image_without_a_label(tmp_path, tiny_vit, pictures):
    line = (
        f"attack {tiny_vit} --images {pictures / '0.png'} --predicted --attack fgsm --epsilon "
        "1,200 --no-corruptions"
    )
    assert ran(tmp_path / "run", line).curves[0].accuracy.value == 1  # of its own prediction


def test_a_model_that_classifies_no_image_correctly_is_not_judged(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.neg_()
    save(model, tmp_path / "bad" / "model.safetensors")
    record = ran(
        tmp_path / "out",
        f"attack {tmp_path / 'bad'} --data digits --limit 3 --attack fgsm --no-corruptions",
    )
    assert (record.metric("accuracy/bad").value, record.checks) == (0, ())
    assert set(states(report(record)).values()) == {"inconclusive"}
    assert not clear_effects(report(record))

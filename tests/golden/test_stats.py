"""The record of `vitlens stats` holds what the functions compute, also over a training."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from scipy import stats as scipy_stats

import vitlens
from tests.kit.commands import figures, ran, refusal, report
from tests.kit.first_page import check_first_page
from tests.kit.making import digits, save
from tests.kit.select import select_one, values_of
from tests.kit.simulated_processes import run_in_processes
from tests.kit.training_runs import kept_run
from vitlens import load, statistics
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder

LINE = "--data digits --limit 12 --batch-size 5"


def test_numbers_are_those_of_the_function(tiny_vit, golden):
    record = golden("stats").record
    split = digits("test").limit(12)
    table = statistics(load(str(tiny_vit)), split)
    rows = record.heads
    offsets = record.offsets["tiny-vit"]
    for layer, head in product(range(2), range(2)):
        for name in ("distance", "entropy", "hoyer"):
            metric = record.metric(f"{name}/tiny-vit/L{layer}.H{head}")
            assert metric.value == pytest.approx(getattr(table, name)[layer, head].item(), rel=1e-6)
            assert metric.low == pytest.approx(table.low(name)[layer, head].item(), rel=1e-6)
            assert metric.n == 12
    assert values_of(rows, "name") == ["L0.H0", "L0.H1", "L1.H0", "L1.H1"]
    assert [row.statistics["gini"].high for row in rows] == pytest.approx(
        table.high("gini").flatten().tolist()
    )
    assert offsets.layer[1].shape == (2, 7, 7)  # a grid of 4 x 4
    np.testing.assert_allclose(offsets.layer[1], table.offset_mass[1].numpy(), rtol=1e-5, atol=1e-8)
    assert record.means[0].labels == Counter(row.label for row in rows)
    faulty = record.metric("dead_or_uniform_heads/tiny-vit")
    assert faulty.low == faulty.value <= faulty.high <= 1
    for row in rows:
        assert row.score.low <= row.score.value <= row.score.high
        assert row.other_score <= row.score.value
        assert 0 <= row.explained_by_offset <= 1
    shares = table.distance / table.uniform_distance()[:, None]
    for row, layer, part in zip(record.local, (0, 1), ("first", "last"), strict=True):
        assert (row.model, row.part, row.layers, row.heads) == ("tiny-vit", part, (layer,), 2)
        assert row.local == int((shares[layer] <= 0.5).sum())
        assert row.share == pytest.approx(shares[layer].mean().item())
    assert (record.layers[0].grid, record.layers[0].unplaced) == ((4, 4), None)
    assert record.layers[0].statistics["token_norm"].value == pytest.approx(
        table.token_norm[0, 0].item()
    )


def test_distances_are_drawn_with_that_of_uniform_attention(golden):
    record = golden("stats").record
    distance = select_one(report(record).figures, name="distance")
    (axes,) = distance.draw().axes
    (level,) = [line.get_ydata() for line in axes.lines if line.get_linestyle() == "--"]
    assert set(level) == {row.uniform_distance for row in record.layers}


def test_the_words_of_heads_are_those_of_the_function(tiny_vit, golden):
    record = golden("stats").record
    split = digits("test").limit(12)
    named_heads = vitlens.name_heads(load(str(tiny_vit)), split, masks=split.masks, batch_size=5)
    assert values_of(record.names, "words") == values_of(named_heads.heads, "words")
    assert values_of(record.names, "share") == values_of(named_heads.heads, "attends.share")
    assert values_of(record.names, "looks_hold") == values_of(named_heads.heads, "looks.holds")
    assert values_of(record.notes, "note") == [
        "what heads write: expected at least 50 images with labels, found 12"
    ]
    for row in record.names:
        assert row.state is None


def test_words_rest_on_the_statistics_of_all_images_and_attributes_are_read_before_anything(
    tiny_vit, pictures, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("vitlens.commands.stats.measure.IMAGES", 8)
    record = ran(tmp_path / "out", f"stats {tiny_vit} {LINE}")
    for head, name in zip(record.heads, record.names, strict=True):
        assert name.looks == {"mixed": "several"}.get(head.label, head.label)
    monkeypatch.setattr("vitlens.commands.stats.measure.QUICK", 0)
    record = ran(tmp_path / "slow", f"stats {tiny_vit} {LINE}")
    assert record.notes[-1].note.endswith("add --names")
    (tmp_path / "a.csv").write_text("file,dark\nother.png,yes\n")
    for word, more in (("stats", ""), ("head", " L0.H0")):
        line = (
            f"{word} {tiny_vit}{more} --images {pictures} --attributes {tmp_path / 'a.csv'} "
            f"--out {tmp_path / word}"
        )
        assert "found none for 3" in refusal(capsys, line)
        assert not (tmp_path / word).exists()
    assert "leave one out" in refusal(
        capsys, f"{line.replace('head', 'stats').replace(' L0.H0', '')} --no-names"
    )


def test_heads_have_words_where_images_have_no_labels_or_other_classes_and_none_where_nobody_asks(
    tiny_vit, pictures, tmp_path
):
    record = ran(tmp_path / "plain", f"stats {tiny_vit} --images {pictures}")
    assert len(record.names) == 4
    assert "labelled images" in record.notes[-1].note
    assert ran(tmp_path / "none", f"stats {tiny_vit} --images {pictures} --no-names").names == ()
    np.savez(
        tmp_path / "other.npz",
        images=np.zeros((9, 32, 32, 3), np.uint8),
        labels=np.zeros(9, np.int64),
    )
    record = ran(tmp_path / "other", f"stats {tiny_vit} --data {tmp_path / 'other.npz'} --limit 9")
    assert len(record.names) == 4


def test_the_interval_of_a_models_mean_is_that_of_its_images(tiny_vit, golden):
    record = golden("stats").record
    model = load(str(tiny_vit))
    images = next(digits("test").limit(12).batches(12)).images
    means = np.array(
        [statistics(model, image[None]).entropy.double().mean().item() for image in images]
    )
    low, high = scipy_stats.t.interval(0.95, 11, means.mean(), scipy_stats.sem(means))
    metric = record.metric("entropy/tiny-vit")
    assert (metric.value, metric.low, metric.high) == pytest.approx(
        (means.mean(), low, high), rel=1e-5
    )


def test_two_processes_find_what_one_does(tiny_vit, golden, tmp_path, monkeypatch):
    """Also the labels of heads, which rest on other sums."""
    line = f"stats {tiny_vit} {LINE} --device cpu --quiet --out {tmp_path / 'two'}".split()
    assert run_in_processes(2, lambda _: run(line), monkeypatch) == [0, 0]
    one = golden("stats").record
    two = read_folder(tmp_path / "two")
    assert two.metrics.keys() == one.metrics.keys()
    for name, metric in one.metrics.items():
        for end in ("value", "low", "high"):
            expected = getattr(metric, end)
            close = None if expected is None else pytest.approx(expected, rel=1e-5, abs=1e-6)
            assert getattr(two.metrics[name], end) == close, name
    for row, other in zip(one.heads, two.heads, strict=True):
        assert (other.label, other.best, other.other) == (row.label, row.best, row.other)
        actual = (other.score.value, other.score.low, other.score.high, other.explained_by_offset)
        expected = (row.score.value, row.score.low, row.score.high, row.explained_by_offset)
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for layer, mass in one.offsets["tiny-vit"].layer.items():
        np.testing.assert_allclose(two.offsets["tiny-vit"].layer[layer], mass, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("word", ["attention", "rollout", "stats"])
def test_a_model_whose_heads_are_all_uniform(word, tiny_vit, tmp_path):
    """Its queries are all zero; said in true words."""
    model = load(str(tiny_vit))
    for block in model.module.blocks:
        width = block.attn.qkv.weight.shape[1]
        block.attn.qkv.weight.data[:width] = 0
        block.attn.qkv.bias.data[:width] = 0
    save(model, tmp_path / "uniform" / "model.safetensors")
    record = ran(tmp_path / "out", f"{word} {tmp_path / 'uniform'} --data digits --limit 24")
    document = report(record)
    check_first_page(document)
    claims = " ".join(sentence.text for sentence in document.first.answer)
    assert {"attention": "are uniform", "rollout": "nearly uniform", "stats": "(4 uniform)"}[
        word
    ] in claims
    assert "fixed place" not in claims
    assert "same for every image" not in claims
    if word == "stats":
        assert [(name.looks, name.looks_hold, name.tested) for name in record.names] == [
            ("uniform", None, False)
        ] * 4


def test_over_a_training_numbers_are_those_of_the_function_at_every_checkpoint(tmp_path):
    # before training and after epochs 2 and 4
    trained = kept_run(tmp_path / "taught", saved_after=(0, 2, 4), epochs=5)
    record = ran(tmp_path / "out", f"stats {trained} {LINE} --over-training --no-names")
    images = next(digits("test").limit(12).batches(12)).images
    files = {epochs: trained / "kept" / f"epoch-{epochs:04}.safetensors" for epochs in (0, 2, 4)}
    files[5] = trained / "model.safetensors"
    assert values_of(record.learning, "epochs") == [0, 2, 4, 5]
    rows = {(row.epochs, row.layer, row.head): row.statistics for row in record.learning_heads}
    assert len(rows) == 4 * 2 * 2
    for epochs, file in files.items():
        table = statistics(load(str(file)), images)
        for name in ("distance", "normalised_entropy", "cls_normalised_entropy"):
            expected = getattr(table, name)
            for layer, head in product(range(2), range(2)):
                assert rows[epochs, layer, head][name] == pytest.approx(
                    expected[layer, head].item(), rel=1e-5
                )
            mean = record.metric(f"learning/taught/{name}/{epochs}")
            assert mean.value == pytest.approx(expected.mean().item(), rel=1e-5)
            assert mean.low < mean.value < mean.high
            assert mean.n == 12
    assert rows[0, 0, 0]["distance"] != rows[5, 0, 0]["distance"]
    assert {"learning_distance", "learning_normalised_entropy"} <= figures(record)


def test_a_long_training_is_measured_at_few_checkpoints_on_few_images(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("vitlens.commands.stats.measure.CHECKPOINTS", 3)
    monkeypatch.setattr("vitlens.commands.stats.measure.IMAGES", 4)
    trained = kept_run(tmp_path / "taught", saved_after=(0, 1, 2, 3, 4, 5), epochs=6)
    learning = ran(
        tmp_path / "out", f"stats {trained} --data digits --limit 5 --over-training --no-names"
    ).learning
    assert [(row.epochs, row.statistics["distance"].n) for row in learning] == [
        (0, 4),
        (3, 4),
        (6, 4),
    ]
    for text in ("{", '{"epoch": 1}\n', '["a"]\n', "\xff"):
        (trained / "metrics.jsonl").write_text(text, encoding="latin-1")
        assert "metrics.jsonl" in refusal(
            capsys, f"stats {trained} --limit 2 --over-training --device cpu --quiet"
        )

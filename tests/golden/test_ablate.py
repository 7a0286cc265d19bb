"""The record of `vitlens ablate` holds what the functions compute; killed runs resume."""

import re
from itertools import chain

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.commands import figures, gone_on, ran, refusal, report, stopping, written_digits
from tests.kit.first_page import clear_effects, states
from tests.kit.making import digits, save
from tests.kit.select import select, select_one, values_of
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder
from vitlens.record_files import flat
from vitlens.uncertainty import LEVEL, fewest_images

DIGITS = "--data digits --limit 12 --batch-size 6"
PLAIN = "--no-curves --pairs 0 --no-patch"


def test_numbers_are_those_of_the_function_and_one_row_holds_every_replacement(
    tiny_vit, golden, tmp_path
):
    """Each image's: tests/public/ablation."""
    record = ran(tmp_path / "out", f"ablate {tiny_vit} {DIGITS} {PLAIN} --replace zero")
    split = digits("test").limit(12)
    model = load(str(tiny_vit))
    importance = vitlens.ablate(model, split, replace="zero", kinds=("head", "mlp", "block"))
    for index, (unit, row) in enumerate(zip(importance.units, record.units, strict=True)):
        part = unit.kind if unit.head is None else unit.head
        assert (row.kind, row.layer, row.head) == (unit.kind, unit.layer, unit.head)
        for name, estimate, change in (
            ("loss", row.loss, importance.loss),
            ("accuracy", row.accuracy, importance.accuracy),
        ):
            assert (
                record.metric(f"importance/tiny-vit/delta_{name}/{unit.layer}/{part}") == estimate
            )
            assert estimate.value == pytest.approx(change.mean[index].item(), rel=1e-4, abs=1e-6)
            assert estimate.low <= estimate.value <= estimate.high
        assert row.matters == (row.p <= LEVEL)
    assert record.metric("heads_that_matter/tiny-vit").value == np.mean(
        values_of(record.heads, "matters")
    )
    spared = [row.effect == "no effect" for row in record.heads]
    assert record.metric("heads_without_effect/tiny-vit").value == np.mean(spared)
    assert record.effects["zero"].units.tolist() == values_of(record.units, "unit")
    correct = vitlens.evaluate(model, split).correct
    assert record.model.accuracy.value == pytest.approx(correct.float().mean().item())
    every = golden("ablate").record
    for row, alone in zip(every.units, record.units, strict=True):
        assert row.other_losses["zero"].value == pytest.approx(alone.loss.value, abs=1e-6)
        assert row.other_effects["zero"] == alone.effect
        assert flat(row)["other_losses_zero"] == row.other_losses["zero"].value
    assert {"forward_equivalents/tiny/mean", "rank_correlation/tiny/zero"} <= every.metrics.keys()
    assert "rank_correlation/tiny-vit/zero" not in record.metrics


def test_a_pruned_model_is_a_model_for_other_commands(golden):
    ablated = golden("ablate")  # --prune 0.25 --save pruned
    record = ablated.record
    place = str(ablated.folder.parent / "pruned")
    unpruned, pruned = record.pruned
    assert (unpruned.heads, pruned.heads) == (4, 3)
    assert unpruned.accuracy == record.model.accuracy
    assert load(place).parameter_count() == pruned.parameters < unpruned.parameters
    least = min(record.heads, key=lambda row: row.loss.value)
    assert (unpruned.cut, pruned.cut) == ((), (least.unit,))
    correct = vitlens.evaluate(load(place), digits("test").limit(12)).correct
    assert pruned.accuracy.value == pytest.approx(correct.float().mean().item())


def test_a_note_says_that_all_images_are_misclassified(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.neg_()
    save(model, tmp_path / "wrong" / "model.safetensors")
    line = (
        f"ablate {tmp_path / 'wrong'} --data digits --limit 12 {PLAIN} --units head --replace zero"
    )
    notes = ran(tmp_path / "out", line).model.notes
    (note,) = [note for note in notes if "none of the 12 images" in note]
    assert note[1:] in (tmp_path / "out" / "report.md").read_text()


def test_folders_named_by_some_of_the_models_classes(tiny_vit, tmp_path):
    """Labels become columns of the logits exactly once: the two classes of the data are 3 and 9 of
    the model.
    """
    data = written_digits(
        tmp_path / "data", 40, lambda at, label: f"test/{label}/{at}.png" if label in (3, 9) else ""
    )
    record = ran(tmp_path / "out", f"ablate {tiny_vit} --data {data} {PLAIN} --replace mean")
    assert sorted(set(record.effects["mean"].labels.tolist())) == [3, 9]


@pytest.mark.parametrize(("images", "by"), [(1, "zero"), (5, "resample"), (8, "mean")])
def test_few_images_take_another_replacement_than_their_mean(
    images, by, tiny_vit, pictures, tmp_path
):
    """Nor are heads ranked without a significant effect: no removal in order, no removable share,
    no such figure.
    """
    images_typed = (
        f"--images {pictures}/0.png --predicted"
        if images == 1
        else f"--data digits --limit {images}"
    )
    record = ran(
        tmp_path / "out",
        f"ablate {tiny_vit} {images_typed} --pairs 5 --prune 0.5 --units head --no-patch",
    )
    assert record.options["replace"] == [by]
    assert set(values_of(record.units, "replace")) == {record.model.replace} == {by}
    assert bool(record.model.reason) == (by != "mean")
    assert record.model.reason in (tmp_path / "out" / "report.md").read_text()
    if images < 8:
        assert (record.model.removable, record.curves, record.pairs) == (None, (), ())
        assert figures(record) == {"importance"}
    if images == 1:  # no interval, no test and no conclusion; its prediction is the label
        assert (record.model.accuracy.value, record.model.accuracy.n) == (1.0, 1)
        assert record.metric("importance/tiny-vit/delta_loss/0/0").low is None
        assert set(values_of(record.units, "p", "effect")) == {(None, "undecided")}
        assert not clear_effects(report(record))
        assert set(states(report(record)).values()) <= {"inconclusive", "not tested"}


def test_a_ranking_needs_enough_images():
    # two-sided sign flips of n images: 2 / 2^n, times Holm's number of units
    assert [fewest_images(units) for units in (1, 36, 144)] == [6, 11, 13]
    assert 36 * 2 / 2**11 <= 0.05 < 36 * 2 / 2**10


@pytest.mark.usefixtures("undrawn")
def test_the_lens_ends_and_curves_begin_at_the_whole_model(pictures, tmp_path):
    record = ran(
        tmp_path / "out",
        "ablate vit-digits --data digits --limit 60 --units head --replace zero --pairs 0",
    )
    # by default an image and its corrupted copy
    [patching], arrays = (
        record.patching,
        record.patched,
    )
    assert arrays.clean.shape == arrays.corrupted.shape
    assert np.abs(arrays.clean - arrays.corrupted).max() > 0
    model = load("vit-digits")
    with torch.no_grad():
        both = model(torch.from_numpy(np.stack([arrays.clean, arrays.corrupted])).float())
    target = model.classes.index(patching.target)
    other = model.classes.index(patching.other)
    difference = (both[:, target] - both[:, other]).tolist()
    assert [patching.difference_clean, patching.difference_corrupted] == pytest.approx(
        difference, rel=1e-4
    )
    assert difference[0] > 0 > difference[1]
    assert patching.corrupted.startswith(f"{patching.clean}, ")
    assert patching.target == patching.clean != patching.other
    assert "patching" in figures(record)
    all_figures = chain.from_iterable(section.figures for section in report(record).sections)
    caption = select_one(all_figures, name="patching_pair").caption
    assert "60" in caption  # one of so many images is drawn
    assert set(values_of(record.contributions, "part")) == {"head", "MLP", "rest"}
    last = record.lens[-1]
    assert last.accuracy.value == pytest.approx(record.model.accuracy.value)
    half = next(row for row in record.lens if row.accuracy.value >= last.accuracy.value / 2)
    with_lens = []
    for candidate in report(record).sections:
        if select(candidate.figures, name="lens"):
            with_lens.append(candidate)
    (section,) = with_lens
    sentence = section.sentences[0].text
    assert f" {half.depth} block" in sentence
    assert {f"{100 * row.accuracy.value:.1f}" for row in (half, last)} <= {
        *re.findall(r"\d+\.\d", sentence)
    }
    for count in (0, len(record.heads)):
        ends = set(values_of(select(record.curves, removed=count), "accuracy.value", "loss"))
        assert len(ends) == 1  # of every order
    typed = (
        f"--clean {pictures}/0.png --corrupted {pictures}/1.png --no-curves --pairs 0 --units head"
    )
    [pair] = ran(tmp_path / "named", f"ablate vit-digits --data digits --limit 2 {typed}").patching
    assert (pair.clean, pair.corrupted, pair.corruption) == ("0.png", "1.png", "")


@pytest.mark.usefixtures("undrawn")
def test_exemplars_are_the_images_of_whose_label_a_head_raises_the_logit_most(tmp_path):
    """The logit is that above the mean of all classes, of which `direct_logit_attribution` says
    every one.
    """
    record = ran(
        tmp_path / "out",
        "ablate vit-digits --data digits --limit 20 --units head --pairs 0 --no-curves",
    )
    model = load("vit-digits")
    split = digits("test").limit(20)
    (batch,) = split.batches(20)
    by_class = [
        vitlens.direct_logit_attribution(model, batch.images, name).heads for name in model.classes
    ]
    added = torch.stack(by_class, -1)
    above = added.gather(-1, batch.labels[:, None, None, None].expand(*added.shape[:3], 1))[
        ..., 0
    ] - added.mean(-1)
    exemplars = select(record.exemplars, layer=3, head=2)
    best = above[:, 3, 2].argsort(descending=True)[: len(exemplars)].tolist()
    assert values_of(exemplars, "image") == [split.names[index] for index in best]
    assert values_of(exemplars, "class_name") == [
        model.classes[int(batch.labels[index])] for index in best
    ]
    assert values_of(exemplars, "adds") == pytest.approx(above[best, 3, 2].tolist(), abs=1e-4)
    pixels = record.pictures.images[values_of(exemplars, "picture")] / 255
    assert np.abs(pixels - batch.images[best].numpy()).max() < 0.01
    assert set(values_of(record.exemplars, "layer", "head")) == set(
        values_of(record.heads, "layer", "head")
    )


def test_a_killed_run_goes_on_at_the_layer_it_was_at_and_no_other(tiny_vit, tmp_path, capsys):
    (batch,) = digits("test").limit(12).batches(12)
    pixels = (batch.images.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    data = tmp_path / "a.npz"
    out = tmp_path / "out"
    other = load(str(tiny_vit))
    np.savez(data, images=pixels, labels=batch.labels.numpy())
    line = f"--data {data} {PLAIN} --batch-size 1"
    with stopping("ablate", at=0) as calls:
        uninterrupted = ran(tmp_path / "whole", f"ablate {tiny_vit} {line}")
    every = calls[0]
    with stopping("ablate", at=5):  # in the second batch
        assert run(f"ablate {tiny_vit} {line} --device cpu --quiet --out {out}".split()) == 1
    assert read_folder(out).status == "failed"
    other.module.head.bias.data.add_(1)
    save(other, tmp_path / "other" / "model.safetensors")
    for model, typed, says in (
        (tmp_path / "other", "", "with its model"),
        (tiny_vit, "--limit 1", "with its images"),
        (tiny_vit, "--seed 1", "with its seed"),
        (tiny_vit, "--replace zero", "with its replace"),
    ):
        assert says in refusal(capsys, f"ablate {model} {line} --quiet --resume {out} {typed}")
    assert "folder of a run" in refusal(
        capsys, f"ablate {tiny_vit} {line} --quiet --resume {tmp_path / 'nothing'}"
    )
    np.savez(data, images=255 - pixels, labels=batch.labels.numpy())
    assert "found others" in refusal(capsys, f"ablate {tiny_vit} {line} --quiet --resume {out}")
    np.savez(data, images=pixels, labels=(batch.labels.numpy() + 1) % 10)
    assert "test labels" in refusal(capsys, f"ablate {tiny_vit} {line} --quiet --resume {out}")
    np.savez(data, images=pixels, labels=batch.labels.numpy())
    stored = len(list((out / "progress").glob("*.npz")))
    with stopping("ablate", at=0) as calls:
        again = gone_on(out, "ablate")
    assert calls[0] == every - stored < every  # what was stored was not measured again
    # also the forward equivalents: recalled outcomes are counted at their cost
    assert again.metrics == uninterrupted.metrics
    assert (again.status, again.tables) == ("done", uninterrupted.tables)
    assert not (out / "progress").exists()


@pytest.fixture
def dictionary(golden):
    """Return the file of a dictionary of the residual stream after block 0 of the tiny ViT."""
    return golden("sae").folder / "dictionary.safetensors"


def test_latents_of_a_dictionary_are_removed_as_heads_are(tiny_vit, dictionary, tmp_path):
    line = f"ablate {tiny_vit} {DIGITS} {PLAIN} --units head --dictionary {dictionary}"
    record = ran(tmp_path / "out", f"{line} --latents 2,5,7 --replace mean,zero")
    split = digits("test").limit(12)
    model = load(str(tiny_vit))
    with vitlens.load_sae(model, dictionary).places([2, 5, 7]):
        importance = vitlens.ablate(model, split, replace="mean", kinds=("head", "latent"))
    assert values_of(record.latents, "latent") == [2, 5, 7]
    assert (record.model.dictionary, record.model.latents) == ("blocks.0.residual", 16)
    for index in importance.of_kind("latent"):
        row = record.units[index]
        change = importance.loss
        measured = (row.loss.value, row.loss.low, row.p, row.first_order)
        expected = (change.mean[index], change.low[index], change.p_holm[index])
        assert measured[:3] == pytest.approx([float(value) for value in expected], abs=1e-6)
        assert record.metric(f"importance/tiny-vit/delta_loss/0/latent{row.latent}") == row.loss
        assert row.first_order is not None
    assert "latents" in figures(record)


def test_without_a_choice_the_latents_that_vary_most_are_removed(tiny_vit, dictionary, tmp_path):
    line = f"ablate {tiny_vit} {DIGITS} {PLAIN} --units head --dictionary {dictionary}"
    record = ran(tmp_path / "out", f"{line} --replace zero")
    model = load(str(tiny_vit))
    sae = vitlens.load_sae(model, dictionary)
    (batch,) = digits("test").limit(12).batches(12)
    tokens = vitlens.capture(model, batch.images, sae.patches)[sae.patches]
    varies = sae.encode(tokens).double().var(0, correction=0).sum(0)
    expected = varies.argsort(descending=True)[:32]
    assert set(values_of(record.latents, "latent")) == set(expected[varies[expected] > 0].tolist())


@pytest.mark.parametrize(
    ("model", "typed", "says"),
    [
        ("vit-digits", "", "another model"),
        ("{vit}", "--latents 99", "expected a latent from 0 to 15"),
        ("{vit}", "--latents one", "expected --latents with latents"),
    ],
)
def test_a_dictionary_or_latent_that_does_not_fit_is_refused(
    model, typed, says, tiny_vit, dictionary, tmp_path, capsys
):
    line = f"ablate {model.format(vit=tiny_vit)} {DIGITS} --dictionary {dictionary} {typed}"
    assert says in refusal(capsys, f"{line} --out {tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_latents_without_a_dictionary_are_refused(tiny_vit, capsys):
    assert "--dictionary FILE" in refusal(capsys, f"ablate {tiny_vit} {DIGITS} --latents 3")

"""What `vitlens sae` measures and writes on a tiny model, and what it refuses."""

import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

import vitlens
from tests.kit.commands import ran, report
from tests.kit.golden import LINES
from tests.kit.waiting import HANGS
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder

STATES = {"confirmed", "correlates", "several", "none"}
FEW = "--data digits --limit 60 --bank 60 --expansion 1 --k 4 --tokens 3000 --no-cache --device cpu"


def test_the_dictionary_and_its_baselines_are_measured_alike(golden):
    record = golden("sae").record
    rows = {row.dictionary: row for row in record.dictionaries}
    assert set(rows) == {"topk", "PCA", "neurons", "k-means"}
    for row in rows.values():
        assert row.variance.value <= 1
        assert 0 <= row.dead.value <= 1
        assert row.l0.n == 60
    assert rows["topk"].l0.value <= 4
    assert rows["k-means"].l0.value == 1


def test_the_latents_with_the_largest_effects_are_tested_and_drawn(golden):
    record = golden("sae").record
    assert len(record.latents) == 4
    sizes = [abs(row.effect.value) for row in record.latents]
    assert sizes == sorted(sizes, reverse=True)
    assert {row.state for row in record.latents} <= STATES
    drawn = {row.latent for row in record.exemplars}
    assert drawn == {row.latent for row in record.latents}
    (gallery,) = record.gallery.values()
    assert len(gallery.images) == len(gallery.maps) == len(record.exemplars)


def test_the_images_of_a_latent_go_from_its_largest_activation_down(golden):
    record = golden("sae").record
    for row in record.latents:
        values = [image.value for image in record.exemplars if image.latent == row.latent]
        assert 0 < len(values) <= 9
        assert values == sorted(values, reverse=True)
        assert min(values) > 0


def test_each_class_shows_its_first_latent_before_any_shows_its_second(golden):
    (table,) = [
        table
        for section in report(golden("sae").record).sections
        for table in section.tables
        if {"class", "rank"} <= set(table.columns)
    ]
    names = [row[table.columns.index("class")] for row in table.rows]
    assert len(set(names)) == len(names)


def test_the_images_of_a_latent_lie_in_one_row_of_the_first_page(golden):
    figure = report(golden("sae").record).first.picture.draw()
    heights = {round(axes.get_position().y1, 6) for axes in figure.axes if axes.images}
    assert len(heights) == 3  # latents


class Run(NamedTuple):
    """The golden run again, by public functions: its dictionary, images and their tokens."""

    sae: vitlens.Dictionary
    images: torch.Tensor
    labels: torch.Tensor
    tokens: torch.Tensor


@pytest.fixture
def again(golden):
    run_of = golden("sae")
    model = vitlens.load(run_of.record.config.models[0].name)
    sae = vitlens.load_sae(model, run_of.folder / "dictionary.safetensors")
    split = vitlens.load_data("digits", limit=60, preprocessing=model.preprocessing)
    (batch,) = split.batches(60)
    tokens = vitlens.capture(model, batch.images, sae.patches)[sae.patches]
    return Run(sae, batch.images, batch.labels.long(), tokens)


def test_the_reconstruction_is_measured_as_by_its_definition(golden, again):
    row = golden("sae").record.dictionaries[0]
    latents = again.sae.encode(again.tokens)
    kept = (latents > 0).any(-1)  # tokens of exceptional norm have no latent
    tokens = again.tokens[kept]
    error = (tokens - again.sae.autoencoder.reconstruct(tokens)).square().sum()
    variance = (tokens - tokens.mean(0)).square().sum()
    assert row.variance.value == pytest.approx(float(1 - error / variance), abs=1e-5)
    l0 = (latents[kept] > 0).double().sum(-1).mean()
    assert row.l0.value == pytest.approx(float(l0), abs=1e-5)
    is_dead = (latents[kept] > 0).sum(0) == 0
    assert row.dead.value == pytest.approx(float(is_dead.double().mean()))


def test_the_loss_recovered_is_on_the_scale_from_mean_ablation_to_the_clean_model(golden, again):
    row = golden("sae").record.dictionaries[0]
    model = again.sae.model

    def loss() -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(again.images), again.labels))

    clean = loss()
    with vitlens.intervene(model, {again.sae.patches: "mean"}, reference=again.images):
        ablated = loss()
    with vitlens.intervene(model, again.sae.splice()):
        spliced = loss()
    if row.recovered_loss is not None:
        expected = (ablated - spliced) / (ablated - clean)
        assert row.recovered_loss.value == pytest.approx(expected, abs=1e-3)
    else:
        assert abs(ablated - clean) < 0.5


def monosemanticity(of_run: Run, embeddings: torch.Tensor) -> float:
    """Return the mean score of the latents, by loops over pairs of images."""
    latents = of_run.sae.encode(of_run.tokens).double()
    kept = (latents > 0).any(-1)  # tokens of exceptional norm have no latent
    activations = latents.sum(1) / kept.sum(1, keepdim=True)
    vectors = F.normalize((embeddings - embeddings.mean(0)).double(), dim=1)
    cosines = vectors @ vectors.T
    scores = []
    for latent in range(len(of_run.sae)):
        values = activations[:, latent]
        if values.max() == values.min():
            continue
        values = (values - values.min()) / (values.max() - values.min())
        above = 0.0
        below = 0.0
        for first in range(60):
            for second in range(first):
                weight = float(values[first] * values[second])
                above += weight * float(cosines[first, second])
                below += weight
        if below:
            scores.append(above / below)
    return sum(scores) / len(scores)


def test_the_monosemanticity_score_is_a_weighted_mean_over_pairs(golden, again):
    row = golden("sae").record.dictionaries[0]
    small = F.interpolate(again.images, size=(16, 16), mode="bilinear", antialias=True)
    expected = monosemanticity(again, small.flatten(1))
    assert row.monosemanticity.value == pytest.approx(expected, abs=1e-4)


def test_images_are_compared_by_the_features_of_another_encoder(
    golden, again, tiny_vit, tiny_cnn, tmp_path
):
    file = golden("sae").folder / "dictionary.safetensors"
    line = f"{FEW} --dictionary {file} --latent 3 --encoder {tiny_cnn} --no-html"
    record = ran(tmp_path / "out", f"sae {tiny_vit} {line}")
    vectors = vitlens.features(vitlens.load(str(tiny_cnn)), again.images, layer=-1).at(-1)
    value = record.dictionaries[0].monosemanticity.value
    assert value == pytest.approx(monosemanticity(again, vectors), abs=1e-4)
    assert value != golden("sae").record.dictionaries[0].monosemanticity.value
    assert record.setup[0].encoder == str(tiny_cnn)


def test_bf16_gives_nearly_the_same_dictionary(golden, tiny_vit, tmp_path):
    line = LINES["sae"].format(vit=tiny_vit)
    record = ran(tmp_path / "out", f"{line} --precision bf16 --tested 1 --seeds 1 --no-html")
    row = record.dictionaries[0]
    exact = golden("sae").record.dictionaries[0]
    assert row.variance.value == pytest.approx(exact.variance.value, abs=0.05)
    assert row.variance.value != exact.variance.value
    assert row.l0.value == pytest.approx(exact.l0.value, abs=0.1)


@pytest.mark.slow  # torchrun and two processes that import torch: 20 s of one core
def test_two_processes_train_the_dictionary_of_one(tiny_vit, tmp_path):
    line = f"sae {tiny_vit} {FEW} --tested 1 --seeds 1 --layer 0 --precision fp32 --no-html"
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for start, name in (("", "one"), (launch, "two")):
        words = f"{start} -m vitlens {line} --quiet --out {tmp_path / name}".split()
        done = subprocess.run(
            [sys.executable, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANGS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(tmp_path / name / "report.md")]  # one of the two speaks
    one, two = (load_file(tmp_path / name / "dictionary.safetensors") for name in ("one", "two"))
    for tensor, values in one.items():
        assert torch.allclose(two[tensor].double(), values.double(), atol=1e-4), tensor


def test_the_gallery_shows_chosen_images(golden, tiny_vit, pictures, tmp_path):
    file = golden("sae").folder / "dictionary.safetensors"
    shown = [pictures / "0.png", pictures / "1.png"]
    line = f"{FEW} --dictionary {file} --tested 3 --show {shown[0]},{shown[1]} --no-html"
    record = ran(tmp_path / "out", f"sae {tiny_vit} {line}")
    images = vitlens.images(shown, vitlens.load(str(tiny_vit)))
    sae = vitlens.load_sae(vitlens.load(str(tiny_vit)), file)
    tokens = vitlens.capture(sae.model, images, sae.patches)[sae.patches]
    largest = sae.encode(tokens).amax(1)
    assert record.exemplars
    for row in record.exemplars:
        number = [path.name for path in shown].index(row.image.rpartition("/")[2])
        assert row.value == pytest.approx(float(largest[number, row.latent]), abs=1e-4)


def test_a_file_of_a_dictionary_is_shown_without_a_training(golden, tiny_vit, tmp_path):
    file = golden("sae").folder / "dictionary.safetensors"
    line = f"sae {tiny_vit} {FEW} --dictionary {file} --latent 3 --no-html --out {tmp_path / 'out'}"
    assert run(line.split()) == 0
    record = read_folder(tmp_path / "out")
    assert [row.latent for row in record.latents] == [3]
    assert [row.dictionary for row in record.dictionaries] == ["topk"]
    assert not record.setup[0].trained


@pytest.fixture
def unlabelled(tmp_path):
    """Write 24 images into a folder without classes."""
    folder = tmp_path / "images"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number:02}.png")
    return folder


def test_images_without_labels_leave_out_the_tests_and_say_so(
    golden, tiny_vit, unlabelled, tmp_path
):
    line = (
        f"sae {tiny_vit} --images {unlabelled} --expansion 1 --k 2 --tokens 600 --no-cache "
        f"--no-html --seeds 1 --out {tmp_path / 'out'} --device cpu"
    )
    assert run(line.split()) == 0
    record = read_folder(tmp_path / "out")
    assert not record.latents
    assert record.exemplars
    assert any("left out without labels" in row.note for row in record.notes)
    assert record.dictionaries[0].recovered_loss is None
    # the picture does not call the latents those with the largest effects
    tested = golden("sae").record
    assert report(record).first.picture.caption != report(tested).first.picture.caption


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--layer 9", "expected --layer from 0 to 1"),
        ("--part neck", "neck"),
        ("--class zebra", "zebra"),
        ("--expansion 500", "expected at least"),
        ("--dictionary nothing.safetensors", "no file"),
        ("--k 99", "expected --k of at most the 16 latents"),
        ("--prefixes 20", "expected --prefixes of at most"),
        ("--latent 16", "expected a latent from 0 to 15"),
        ("--encoder nothing", "nothing"),
        ("--show nothing.png", "nothing.png"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(more, message, tiny_vit, tmp_path, capsys):
    line = f"sae {tiny_vit} {FEW} {more} --out {tmp_path / 'out'}"
    assert run(line.split()) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert not (tmp_path / "out").exists()


def test_a_dictionary_of_another_layer_or_model_is_refused(golden, tiny_vit, tmp_path, capsys):
    file = golden("sae").folder / "dictionary.safetensors"
    out = f"--dictionary {file} --out {tmp_path / 'out'}"
    assert run(f"sae {tiny_vit} {FEW} --layer 1 {out}".split()) == 2
    assert "blocks.1.residual" in capsys.readouterr().err
    assert run(f"sae {tiny_vit} {FEW} --part mlp {out}".split()) == 2
    assert "--part mlp" in capsys.readouterr().err
    assert run(f"sae vit-digits {FEW} {out}".split()) == 2
    assert "another model" in capsys.readouterr().err


def test_public_functions_give_the_labels_of_the_command(golden, again):
    row = golden("sae").record.latents[0]
    split = vitlens.load_data("digits", limit=60, preprocessing=again.sae.model.preprocessing)
    names = vitlens.name_latents(again.sae, split, tested=1, chosen=[row.latent])
    assert names.latents[0].latent == row.latent
    assert names.latents[0].effect.value == pytest.approx(row.effect.value, abs=1e-4)

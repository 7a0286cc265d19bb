"""`vitlens look`: its output, and the images, models and attention weights that it takes."""

import pickle
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

import vitlens
from tests.kit.commands import refusal, report
from tests.kit.first_page import check_first_page, judged
from tests.kit.select import select, select_one, values_of
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.look.record import LookRecord
from vitlens.commands.look.report import REPORT
from vitlens.commands.run.publish import read_folder
from vitlens.errors import InputError
from vitlens.uncertainty import Estimate

QUIET = ("--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def record(golden) -> LookRecord:
    """Return a look at three images."""
    return golden("look").record


@pytest.fixture(scope="module")
def seen(tiny_vit, pictures):
    return vitlens.look(load(str(tiny_vit)), pictures)


def test_what_is_no_image_is_one_line_each_and_does_not_count(tiny_vit, pictures, tmp_path, capsys):
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty").mkdir()
    wrong = [str(tmp_path / "text.jpg"), str(tmp_path / "empty"), str(tmp_path / "gone.png")]
    line = ["--model", str(tiny_vit), "--device", "cpu", "--out"]
    images = [str(pictures / f"{number}.png") for number in (1, 0, 2, 1)]
    assert run(["look", *wrong, *images, "--limit", "2", *line, str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("left out")]
    assert len(lines) == 3
    for name in wrong:
        assert sum(Path(name).name in line for line in lines) == 1
    assert "the first 2 images of 5 files" in said
    assert read_folder(tmp_path / "out").names == ["1.png", "0.png"]
    # of text.jpg and the images, as many are readable as the first two checks of two files read
    assert run(["look", wrong[0], *images[:3], "--limit", "2", *line, str(tmp_path / "few")]) == 0
    assert "the first 2 images of 4 files" in capsys.readouterr().err
    assert run(["look", *wrong, *line, str(tmp_path / "none")]) == 2
    messages = capsys.readouterr().err.strip().splitlines()
    assert len(messages) == 1
    assert "found none" in messages[0]
    assert not (tmp_path / "none").exists()


LOADED = (
    "--model vit-micro --random-weights --seed 3 --image-size 48",
    "--model odd={code} --model-file {code} --classes {folder}/classes.txt",
    "--model {folder}/weights.pt --arch vit-micro --mean 0.2,0.3,0.4 --std 0.5,0.6,1.0",
    "--model vit-micro --weights {folder}/weights.pt",
)


@pytest.mark.parametrize("options", LOADED)
def test_the_command_that_it_suggests_runs_the_same_model(options, pictures, tmp_path):
    code = tmp_path / "my code.py"
    code.write_text("import vitlens\ndef vit():\n    return vitlens.load('vit-digits')\n")
    (tmp_path / "classes.txt").write_text("\n".join(f"class {label}" for label in range(10)))
    weights = load("vit-micro", random_weights=True, seed=5).module.state_dict()
    torch.save(weights, tmp_path / "weights.pt")
    words = []
    for word in options.split():
        words.append(word.format(code=f"{code}:vit", folder=tmp_path))
    looked, predicted = tmp_path / "look", tmp_path / "predict"
    image = str(pictures / "0.png")
    assert run(["look", image, *words, *QUIET, "--out", str(looked)]) == 0
    text = (looked / "report.md").read_text()
    suggested = shlex.split(text.partition("`vitlens explain ")[2].partition("`")[0])
    assert suggested.pop() == "--verify"
    # predict loads the model as explain does
    assert run(["predict", *suggested, *QUIET, "--out", str(predicted)]) == 0
    (seen,), (again,) = (read_folder(folder).predictions for folder in (looked, predicted))
    shares = zip(seen.top_classes, again.top_classes)
    for (name, share), (same_name, same_share) in shares:
        assert name == same_name
        assert share == pytest.approx(same_share, abs=1e-6)


def test_its_rows_and_arrays_are_what_the_function_gives_and_the_terminal_shows_them(
    record, seen, golden
):
    names, shares = zip(*record.predictions[1].top_classes)
    assert names == seen.names[1]
    assert shares == pytest.approx(seen.probabilities[1].tolist())
    assert (
        [Path(row.image).name for row in record.predictions]
        == record.names
        == ["0.png", "1.png", "2.png"]
    )
    heads = record.heads_of(1, most=4)
    assert values_of(heads, "layer", "head") == values_of(seen.heads(1, most=4), "layer", "head")
    assert values_of(heads, "delta_loss") == pytest.approx(
        values_of(seen.heads(1, most=4), "delta_loss")
    )
    np.testing.assert_allclose(record.maps.prediction, seen.maps[:, 0])
    np.testing.assert_allclose(record.maps.runner_up, seen.maps[:, 1])
    (row,) = record.look
    assert (row.method, row.replace, row.images, row.heads) == ("best", "resample", 3, 4)
    output = "\n".join(golden("look").said)
    first = record.predictions[0]
    head = record.heads[0]
    assert f"{100 * first.probability_1:.1f} %  {first.class_1}" in output
    assert f"{head.name}  {100 * head.probability:.1f} %" in output


def test_it_claims_the_head_with_the_greatest_effect_and_judges_nothing(record):
    document = report(record)
    check_first_page(document)
    assert not judged(document)
    # files, not paths
    assert [row[0] for row in document.first.glance.rows] == [
        "0.png",
        "1.png",
        "2.png",
    ]
    assert set(document.explorer.images[0].maps) == {"prediction", "runner-up"}
    mean = np.mean(values_of(select(record.heads, layer=1, head=0), "delta_loss"))
    assert document.explorer.importance[1, 0] == pytest.approx(mean)
    most = max(record.heads, key=lambda row: row.delta_loss)
    claim = next(claim for claim in document.claims if claim.question == "head")
    assert claim.evidence == "intervened"
    assert most.name in claim.says
    harmless = tuple(replace(row, delta_loss=-abs(row.delta_loss)) for row in record.heads)
    sentences = values_of(report(replace(record, heads=harmless)).first.answer, "text")
    for text in sentences:
        for row in harmless:
            assert row.name not in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: 0 * m, "all equal"),
        (lambda m: -np.abs(m) - np.arange(4) / 9, "no value above 0"),
        (lambda m: m * np.nan, "not finite"),
    ],
)
def test_a_map_that_says_nothing_is_crossed_out_with_the_reason(record, change, reason):
    def crossed(of: LookRecord) -> int:
        figure = report(of).first.picture.draw()
        return [text.get_text() for axes in figure.axes for text in axes.texts].count(reason)

    assert crossed(record) == 0
    assert (
        crossed(
            replace(record, maps=replace(record.maps, prediction=change(record.maps.prediction)))
        )
        == 3
    )


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return empty caches of the hubs, without a network, and the checkpoints of torch.hub."""
    monkeypatch.delenv("TORCH_HOME", raising=False)
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "huggingface" / "hub")
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing answers there
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def chosen(folder: Path, image: Path, capsys, *more: str) -> tuple[str, str]:
    """Return the model that is chosen and the reason, from the record and the terminal."""
    assert run(["look", str(image), *more, "--device", "cpu", "--out", str(folder)]) == 0
    looked = read_folder(folder)
    (row,) = looked.look
    assert row.chosen in capsys.readouterr().err
    return looked.config.models[0].name, row.chosen


def test_the_model_is_the_named_one_then_the_smallest_on_the_disk_then_the_bundled_one(
    caches, pictures, tmp_path, capsys
):
    name, why = chosen(tmp_path / "none", pictures / "0.png", capsys)
    assert name == "vit-digits"
    for words in ("only the digits 0 to 9", "127.0.0.1:9 does not answer", "--model"):
        assert words in why
    name, why = chosen(tmp_path / "offline", pictures / "0.png", capsys, "--offline")
    assert "nothing is downloaded offline" in why
    # the first by name
    for file in (
        "deit_base_patch16_224-b5f2ef4d.pth",
        "deit_tiny_patch16_224-a1311bcf.pth",
    ):
        (caches / file).write_bytes(b"many weights" if "base" in file else b"weights")
    # they are broken
    assert run(["look", str(pictures / "0.png"), "--out", str(tmp_path / "disk")]) == 2
    assert "takes timm:deit_tiny_patch16_224, the smallest" in capsys.readouterr().err
    weights = (
        f"look {pictures / '0.png'} --weights {caches / 'deit_tiny_patch16_224-a1311bcf.pth'} "
        "--quiet"
    )
    assert "expected --model" in refusal(capsys, weights)
    (row,) = vitlens.read(tmp_path / "offline").table("look")
    assert (row.digits, row.replace) == (True, "zero")  # one image has no other to resample from


def test_how_it_works_is_told_by_stages_from_labels_and_ablated_heads(record, seen):
    assert values_of(record.stages, "layers") == ["0", "1"]
    for layer, row in enumerate(record.stages):
        labels = values_of(seen.labels[layer], "label")
        clear = [label for label in labels if label not in ("mixed", "no single pattern")]
        assert (row.heads, sum(row.attends.values()), row.unclear) == (
            2,
            len(clear),
            2 - len(clear),
        )
        assert set(row.attends) == set(clear)
        rises = {
            f"L{at}.H{head}": seen.delta_loss[:, n].mean()
            for n, (at, head) in enumerate(seen.places)
        }
        most = max(
            (name for name in rises if name.startswith(f"L{layer}.")),
            key=lambda name: float(rises[name]),
        )
        assert row.head == most
        assert row.loss.value == pytest.approx(float(rises[most]), abs=1e-6)
        uniform = seen.statistics.uniform_distance()[layer]
        assert row.range == pytest.approx(float((seen.statistics.distance[layer] / uniform).mean()))

    def told(of: LookRecord) -> list[str]:
        (section,) = [part for part in report(of).sections if part.title.startswith("How does")]
        return values_of(section.sentences, "text")

    assert len(told(record)) == 2
    harmless = tuple(replace(row, loss=Estimate(-0.1, unit="nats")) for row in record.stages)
    for row in harmless:
        for text in told(replace(record, stages=harmless)):
            assert row.head not in text


def weights_of(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Draw weights (..., keys) whose rows sum to 1."""
    raw = np.random.default_rng(seed).exponential(size=shape).astype(np.float32)
    return np.asarray(raw / raw.sum(-1, keepdims=True))


def saved(folder: Path, weights: NDArray[np.generic], name: str = "attention.npy") -> str:
    np.save(folder / name, weights)
    return str(folder / name)


def test_its_explorer_is_that_of_the_model_whose_weights_they_are(
    tiny_vit, pictures, tmp_path, capsys
):
    model = load(str(tiny_vit))
    image = pictures / "0.png"
    seen = vitlens.explorer(model, vitlens.images(image, model)).explorer.images[0]
    captured = vitlens.capture(
        model, vitlens.images(image, model), [f"blocks.{n}.attention.weights" for n in (0, 1)]
    )
    exact = torch.cat(list(captured.values())).numpy()
    line = [
        "look",
        "--attention",
        saved(tmp_path, exact),
        "--image",
        str(image),
        "--out",
        str(tmp_path / "out"),
    ]
    assert run(line) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "report.html")
    record = read_folder(tmp_path / "out")
    document = REPORT(record)
    check_first_page(document)
    data = document.explorer
    assert (data.model, data.keys, data.special) == ("attention.npy", (4, 4), ("CLS",))
    np.testing.assert_allclose(data.images[0].weights, seen.weights, atol=1e-6)
    np.testing.assert_allclose(data.images[0].rollout, seen.rollout, atol=2e-3)
    (row,) = record.given
    assert (row.layers, row.heads, row.tokens, row.prefix, row.found, row.off) == (
        2,
        2,
        17,
        1,
        True,
        0,
    )
    np.testing.assert_allclose(
        record.given_maps.maps[1].ravel(), exact[1].mean(0)[0, 1:], atol=1e-6
    )
    places = [(number // 4, number % 4) for number in range(16)]
    for layer, layer_row in enumerate(record.given_layers):
        patches = exact[layer].mean(0)[1:, 1:]
        mean_weights = exact[layer].mean(0)
        apart = cdist(places, places)
        assert layer_row.distance == pytest.approx(
            (patches * apart).sum() / patches.sum(), rel=1e-4
        )
        assert layer_row.on_prefix == pytest.approx(mean_weights[1:, 0].mean(), rel=1e-4)


def test_rows_that_do_not_sum_to_1_are_said_and_others_are_not(pictures, tmp_path):
    weights = weights_of(2, 2, 17, 17)
    line = ["look", str(pictures / "0.png"), "--quiet", "--attention"]
    assert run([*line, saved(tmp_path, weights), "--out", str(tmp_path / "whole")]) == 0
    weights[1, 0, 3] *= 0.5
    assert run([*line, saved(tmp_path, weights), "--out", str(tmp_path / "half")]) == 0
    said = {name: REPORT(read_folder(tmp_path / name)).claims for name in ("whole", "half")}
    assert not select(said["whole"], question="sums of rows")
    claim = select_one(said["half"], question="sums of rows")
    assert "1 of 68" in claim.says
    (row,) = read_folder(tmp_path / "half").given
    assert row.least == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("tokens", "typed", "prefix"),
    [(16, None, 0), (17, None, 1), (18, None, 2), (21, None, 5), (25, 9, 9)],
)
def test_prefix_tokens_are_found_or_given(tokens, typed, prefix):
    pixels = np.zeros((32, 48, 3), np.uint8)
    data = vitlens.attention_explorer(
        weights_of(1, 2, tokens, tokens), pixels, prefix=typed
    ).explorer
    side = int(np.sqrt(tokens - prefix))
    assert (len(data.special), data.keys) == (prefix, (side, side))
    assert data.images[0].picture.shape[0] == data.images[0].picture.shape[1]  # the centre square


def test_many_tokens_in_half_precision_are_pooled_and_more_than_a_page_holds_are_refused(tmp_path):
    tokens = 1 + 24 * 24
    weights = weights_of(2, 1, tokens, tokens)
    data = vitlens.attention_explorer(
        torch.tensor(weights).half(), np.zeros((9, 9, 3), np.uint8)
    ).explorer
    assert (data.keys, data.queries) == ((24, 24), (14, 14))
    assert not data.images[0].facts  # its rows sum to 1, to rounding
    np.testing.assert_allclose(data.images[0].weights.sum(-1), 1, atol=0.02)
    path = tmp_path / "many.npy"
    # of holes
    header = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(400, 16, 197, 197))
    del header
    with pytest.raises(InputError, match=r"save some layers: weights\[-4:\]"):
        vitlens.attention_explorer(np.load(path, mmap_mode="r"), np.zeros((9, 9, 3), np.uint8))


# what is in the file, as a function of good weights (layers, heads, 17, 17); what is said
WRONG = {
    "save weights[None]": lambda good: good[0],
    "weights[:, 0]": lambda good: good[:, None],
    "(2, 2, 16, 17)": lambda good: good[:, :, 1:],
    "give --prefix N": lambda _: weights_of(2, 2, 323, 323),
    "(0, 2, 17, 17)": lambda good: good[:0],
    "after the softmax": lambda good: -good,
    "expected finite weights": lambda good: good * np.nan,
    "floating-point": lambda _: np.ones((1, 1, 17, 17), np.int64),
}


CALLS = """
--attention {at}/pickle.npy --image {image} | expected a plain array
--attention {at}/several.npz --image {image} | found an .npz
--attention {at}/cut.npy --image {image} | expected a plain array
--attention {at}/gone.npy --image {image} | found no file
--attention {good} | add --image FILE
--attention {good} --image {pictures} | expected one image
--attention {good} --image gone.png | gone.png
--attention {good} --image {image} --prefix 2 | try --prefix 1
--attention {good} --image {image} --model vit-digits | leave out --model
--image {image} | add --attention FILE.npy
--quiet | vitlens look cat.jpg
"""


@pytest.mark.parametrize("case", [*WRONG, *CALLS.strip().splitlines()])
def test_other_arrays_files_and_calls_are_one_line_and_leave_no_folder(
    case, pictures, tmp_path, capsys
):
    weights = weights_of(2, 2, 17, 17)
    good = saved(tmp_path, weights)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps([1]))
    np.savez(tmp_path / "several.npz", good=np.zeros(3))
    (tmp_path / "cut.npy").write_bytes(Path(good).read_bytes()[:300])
    line, _, message = case.partition(" | ")
    if case in WRONG:
        np.save(tmp_path / "wrong.npy", WRONG[case](weights))
        line = "--attention {at}/wrong.npy --image {image}"
        message = case
    words = line.format(at=tmp_path, good=good, image=pictures / "0.png", pictures=pictures)
    assert message in refusal(capsys, f"look {words} --out {tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()

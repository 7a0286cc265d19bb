"""`vitlens look --attention`: weights of any model in the explorer, and wrong calls."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import vitlens
from tests.kit.commands import refusal
from tests.kit.first_page import check_first_page
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.look.report import REPORT
from vitlens.commands.run.publish import read_folder
from vitlens.errors import InputError


def weights_of(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Weights (..., keys) whose rows sum to 1."""
    raw = np.random.default_rng(seed).exponential(size=shape).astype(np.float32)
    return np.asarray(raw / raw.sum(-1, keepdims=True))


def saved(folder: Path, weights: NDArray[np.generic], name: str = "attention.npy") -> str:
    np.save(folder / name, weights)
    return str(folder / name)


def test_its_explorer_is_that_of_the_model_whose_weights_they_are(tiny_vit, pictures, tmp_path, capsys):
    model, image = load(str(tiny_vit)), pictures / "0.png"
    seen = vitlens.explorer(model, vitlens.images(image, model)).explorer.images[0]
    captured = vitlens.capture(model, vitlens.images(image, model), [f"blocks.{n}.attention.weights" for n in (0, 1)])
    exact = torch.cat(list(captured.values())).numpy()
    line = ["look", "--attention", saved(tmp_path, exact), "--image", str(image), "--out", str(tmp_path / "out")]
    assert run(line) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "report.html")
    record = read_folder(tmp_path / "out")
    document = REPORT(record)
    check_first_page(document)
    shown = document.explorer
    assert (shown.model, shown.keys, shown.special) == ("attention.npy", (4, 4), ("CLS",))
    np.testing.assert_allclose(shown.images[0].weights, seen.weights, atol=1e-6)
    np.testing.assert_allclose(shown.images[0].rollout, seen.rollout, atol=2e-3)
    (row,) = record.given
    assert (row.layers, row.heads, row.tokens, row.prefix, row.found, row.off) == (2, 2, 17, 1, True, 0)
    np.testing.assert_allclose(record.given_maps.maps[1].ravel(), exact[1].mean(0)[0, 1:], atol=1e-6)
    places = [(number // 4, number % 4) for number in range(16)]
    for layer, each in enumerate(record.given_layers):
        patches, whole = exact[layer].mean(0)[1:, 1:], exact[layer].mean(0)
        apart = [[np.hypot(a - c, b - d) for c, d in places] for a, b in places]
        assert each.distance == pytest.approx((patches * apart).sum() / patches.sum(), rel=1e-4)
        assert each.on_prefix == pytest.approx(whole[1:, 0].mean(), rel=1e-4)


def test_rows_that_do_not_sum_to_1_are_said_and_others_are_not(pictures, tmp_path):
    weights = weights_of(2, 2, 17, 17)
    line = ["look", str(pictures / "0.png"), "--quiet", "--attention"]
    assert run([*line, saved(tmp_path, weights), "--out", str(tmp_path / "whole")]) == 0
    weights[1, 0, 3] *= 0.5
    assert run([*line, saved(tmp_path, weights), "--out", str(tmp_path / "half")]) == 0
    said = {name: REPORT(read_folder(tmp_path / name)).claims for name in ("whole", "half")}
    assert not [claim for claim in said["whole"] if claim.question == "sums of rows"]
    (claim,) = [claim for claim in said["half"] if claim.question == "sums of rows"]
    assert "1 of 68" in claim.says
    (row,) = read_folder(tmp_path / "half").given
    assert row.least == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("tokens", "given", "prefix"), [(16, None, 0), (17, None, 1), (18, None, 2), (21, None, 5), (25, 9, 9)]
)
def test_prefix_tokens_are_found_or_given(tokens, given, prefix):
    pixels = np.zeros((32, 48, 3), np.uint8)
    shown = vitlens.attention_explorer(weights_of(1, 2, tokens, tokens), pixels, prefix=given).explorer
    side = int(np.sqrt(tokens - prefix))
    assert (len(shown.special), shown.keys) == (prefix, (side, side))
    assert shown.images[0].picture.shape[0] == shown.images[0].picture.shape[1]  # the centre square


def test_a_tensor_in_half_precision_with_many_tokens_is_pooled():
    tokens = 1 + 24 * 24
    weights = weights_of(2, 1, tokens, tokens)
    shown = vitlens.attention_explorer(torch.tensor(weights).half(), np.zeros((9, 9, 3), np.uint8)).explorer
    assert (shown.keys, shown.queries) == ((24, 24), (14, 14))
    assert not shown.images[0].facts  # its rows sum to 1, to rounding
    np.testing.assert_allclose(shown.images[0].weights.sum(-1), 1, atol=0.02)


WRONG = {  # what is in the file, as a function of good weights (layers, heads, 17, 17); what is said
    "save weights[None]": lambda good: good[0],
    "weights[:, 0]": lambda good: good[:, None],
    "(2, 2, 16, 17)": lambda good: good[:, :, 1:],
    "give --prefix N": lambda _: weights_of(2, 2, 323, 323),
    "(0, 2, 17, 17)": lambda good: good[:0],
    "after the softmax": lambda good: -good,
    "expected finite weights": lambda good: good * np.nan,
    "floating-point": lambda _: np.ones((1, 1, 17, 17), np.int64),
    "expected a plain array": lambda _: np.array([{"a": 1}], dtype=object),
}


@pytest.mark.parametrize("told", WRONG)
def test_other_arrays_are_one_line_and_leave_no_folder(told, pictures, tmp_path, capsys):
    np.save(tmp_path / "attention.npy", WRONG[told](weights_of(2, 2, 17, 17)), allow_pickle=True)
    line = f"look --attention {tmp_path / 'attention.npy'} --image {pictures / '0.png'} --out {tmp_path / 'out'}"
    assert told in refusal(capsys, line)
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("case", CALLS.strip().splitlines())
def test_other_files_and_calls_are_one_line(case, pictures, tmp_path, capsys):
    good = saved(tmp_path, weights_of(1, 2, 17, 17))
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps([1]))
    np.savez(tmp_path / "several.npz", good=np.zeros(3))
    (tmp_path / "cut.npy").write_bytes(Path(good).read_bytes()[:300])
    line, _, told = case.partition(" | ")
    words = line.format(at=tmp_path, good=good, image=pictures / "0.png", pictures=pictures)
    assert told in refusal(capsys, f"look {words} --out {tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_more_weights_than_a_page_can_hold_are_refused_before_they_are_read(tmp_path):
    path = tmp_path / "many.npy"
    header = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(400, 16, 197, 197))  # of holes
    del header
    with pytest.raises(InputError, match=r"save some layers: weights\[-4:\]"):
        vitlens.attention_explorer(np.load(path, mmap_mode="r"), np.zeros((9, 9, 3), np.uint8))

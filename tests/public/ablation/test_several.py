"""`vitlens ablate` on several units, against full forwards: orders, pairs, first order."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit.commands import gone_on, ran
from tests.kit.making import CLASSES, save, untrained
from tests.kit.select import select, values_of
from tests.kit.sign_flips import sign_flip_test
from tests.kit.simulated_processes import run_in_processes
from tests.kit.vectors import gram_cka
from vitlens import Model
from vitlens.cli.main import run
from vitlens.commands.ablate.record import AblateRecord
from vitlens.commands.run.publish import read_folder
from vitlens.uncertainty import bootstrap_mean, holm

IMAGES = 24  # ranked on every other one, and removed in order on the others
CLOSE = {"abs": 2e-5}


class Ablated:
    """A run of the command, its model and images, and full forwards without some of the heads."""

    def __init__(self, folder: Path, by: str) -> None:
        shape = {"dim": 16, "depth": 3, "heads": 2, "patch_size": [8, 16]}
        model = untrained("vit-mini", classes=CLASSES, seed=3, overrides=shape)
        with torch.no_grad():  # so that heads matter
            model.module.head.weight.mul_(12)
            for block in model.module.blocks:
                block.attn.proj.weight.mul_(4)
                block.attn.qkv.weight.mul_(2)
            qkv = model.module.blocks[0].attn.qkv
            for start in (0, 16, 32):  # query, key and value of head 1 are those of head 0
                qkv.weight[start + 8 : start + 16] = qkv.weight[start : start + 8]
                qkv.bias[start + 8 : start + 16] = qkv.bias[start : start + 8]
        save(model, folder / "model" / "model.safetensors")
        pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
        self.images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
        self.model: Model = vitlens.load(str(folder / "model"))
        self.labels = self.model(self.images).argmax(1)
        np.savez(
            folder / "data.npz",
            test_images=pixels,
            test_labels=self.labels.numpy(),
            classes=CLASSES,
        )
        self.by, self.captured = by, vitlens.capture(self.model, self.images, "blocks.*.head.*")
        self.heads = [f"L{layer}.H{head}" for layer in range(3) for head in range(2)]
        line = (
            f"ablate tiny={folder / 'model'} --data {folder / 'data.npz'} --replace {by} "
            "--units head --no-patch"
        )
        self.line = f"{line} --batch-size 9 --greedy --pairs 3"
        self.record: AblateRecord = ran(folder / "out", self.line)

    def place(self, head: str) -> str:
        return f"blocks.{head[1]}.head.{head[4]}"

    def put(self, place: str) -> Tensor:
        """Return the replacement of a head's output: the mean, or another image's output."""
        activations = self.captured[place]
        if self.by == "mean":
            return activations.mean(0).expand_as(activations)
        with vitlens.intervene(self.model, {place: "resample"}, seed=0):
            return vitlens.capture(self.model, self.images, place)[place]

    def without(self, *heads: str) -> tuple[Tensor, Tensor]:
        """Return every image's loss, and True where it is correct."""
        return self.losses({self.place(head): self.put(self.place(head)) for head in heads})

    def losses(self, changes: dict[str, Any], part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        with vitlens.intervene(self.model, changes, seed=0) as changed, torch.no_grad():
            logits = changed(self.images[part])
            labels = self.labels[part]
        return F.cross_entropy(logits, labels, reduction="none").double(), logits.argmax(
            1
        ) == labels

    def ranked(self, *heads: str) -> float:
        """Return the mean loss of the images that rank heads again, with one another's outputs."""
        part = slice(0, None, 2)
        if self.by == "resample":
            return float(
                self.losses(dict.fromkeys(map(self.place, heads), "resample"), part)[0].mean()
            )
        return float(self.without(*heads)[0][part].mean())

    def rise(self, *heads: str) -> Tensor:
        return self.without(*heads)[0] - self.without()[0]


@pytest.fixture(scope="module", params=["mean", "resample"])
def ablated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ablated:
    return Ablated(tmp_path_factory.mktemp(request.param), request.param)


def test_every_images_effects_are_stored_and_the_slope_towards_the_replacement(
    ablated: Ablated,
) -> None:
    arrays = ablated.record.effects[ablated.by]
    step = 1e-2
    slopes = arrays.first_order
    assert arrays.units.tolist() == ablated.heads
    for row, head in enumerate(ablated.heads):
        np.testing.assert_allclose(arrays.delta_loss[row], ablated.rise(head).numpy(), atol=2e-5)
        assert arrays.correct[row].tolist() == ablated.without(head)[1].tolist()
        place = ablated.place(head)
        activations = ablated.captured[place]
        towards = step * (ablated.put(place) - activations)
        forth = ablated.losses({place: activations + 1 * towards})[0]
        back = ablated.losses({place: activations + (-1) * towards})[0]
        np.testing.assert_allclose(slopes[row], ((forth - back) / (2 * step)).numpy(), atol=5e-3)
        assert ablated.record.heads[row].first_order == pytest.approx(
            float(slopes[row].mean()), abs=1e-6
        )
    assert np.abs(slopes).max() > 0.1


def orders(ablated: Ablated) -> dict[str, list[str]]:
    """Rank heads on the first half of the images by full forwards; random orders are left out."""
    ranked = slice(0, None, 2)
    alone = {head: float(ablated.rise(head)[ranked].mean()) for head in ablated.heads}
    least = sorted(ablated.heads, key=alone.__getitem__)
    estimates = ablated.record.effects[ablated.by].first_order[:, ranked].mean(1)
    gone: list[str] = []
    while len(gone) < len(ablated.heads):
        left = [head for head in ablated.heads if head not in gone]
        gone.append(min(left, key=lambda head: ablated.ranked(*gone, head)))
    by_slope = [ablated.heads[at] for at in estimates.argsort()]
    return {
        "least first": least,
        "most first": least[::-1],
        "first-order": by_slope,
        "greedy": gone,
    }


def test_a_curve_is_full_forwards_without_the_first_heads(ablated: Ablated) -> None:
    tested = slice(1, None, 2)
    known_orders = orders(ablated)
    names = set(values_of(ablated.record.curves, "order"))
    assert names == {*known_orders, "random 0", "random 1"}
    for name in names:
        points = select(ablated.record.curves, order=name)
        assert values_of(points, "removed") == list(range(7))
        for row in points:
            if name in known_orders or row.removed in (0, 6):
                loss, correct = ablated.without(
                    *(known_orders.get(name, ablated.heads))[: row.removed]
                )
                assert row.loss == pytest.approx(float(loss[tested].mean()), **CLOSE), (
                    name,
                    row.removed,
                )
                assert row.accuracy.value == float(correct[tested].double().mean())
    least = values_of(select(ablated.record.curves, order="least first"), "accuracy.value")
    removable = ablated.record.model.removable  # its interval: tests/kernels/ablation
    lost = next(count for count in range(7) if least[0] - least[count] > 0.01)
    assert (removable.value, removable.n) == ((lost - 1) / 6, 12)
    resampled = 6 * (ablated.by == "resample")  # in each of six rounds a pass of the other images
    # candidates are replayed
    assert ablated.record.model.forwards["greedy"].value - resampled < 0.75 * 6 * 7 / 2


def test_pairs_are_full_forwards_with_paired_intervals(ablated: Ablated) -> None:
    record = ablated.record
    alone = {head: float(ablated.rise(head).mean()) for head in ablated.heads}
    top = sorted(ablated.heads, key=lambda head: -alone[head])[:3]
    important = set(values_of(select(record.pairs, chosen="importance"), "first", "second"))
    assert important == {tuple(sorted(pair)) for pair in combinations(top, 2)}
    assert ("L0.H0", "L0.H1") in values_of(record.pairs, "first", "second")  # equal heads
    p = []
    for row in record.pairs:
        both = ablated.rise(row.first, row.second)
        beyond = both - ablated.rise(row.first) - ablated.rise(row.second)
        expected = bootstrap_mean(beyond.numpy(), seed=0)
        ends = (row.synergy.value, row.synergy.low, row.synergy.high)
        assert ends == pytest.approx((expected.value, expected.low, expected.high), abs=1e-4)
        assert (row.both, row.first_alone) == pytest.approx(
            (float(both.mean()), alone[row.first]), **CLOSE
        )
        assert row.second_alone == pytest.approx(alone[row.second], **CLOSE)
        p.append(sign_flip_test(beyond.numpy(), seed=0))
        outputs = [
            ablated.captured[ablated.place(head)].flatten(0, -2) for head in (row.first, row.second)
        ]
        assert row.similarity == pytest.approx(gram_cka(*outputs), abs=1e-4)
    assert values_of(record.pairs, "p") == pytest.approx(holm(p), abs=0.02)
    assert max(abs(row.synergy.value) for row in record.pairs) > 1e-3


@pytest.mark.parametrize("ablated", ["resample"], indirect=True)
def test_two_processes_find_the_same_pairs(
    ablated: Ablated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"{ablated.line} --device cpu --quiet --out {tmp_path / 'two'}".split()
    assert run_in_processes(2, lambda _: run(line), monkeypatch) == [0, 0]
    for row, other in zip(ablated.record.pairs, read_folder(tmp_path / "two").pairs, strict=True):
        assert (other.pair, other.chosen) == (row.pair, row.chosen)
        actual = (other.similarity, other.both, other.synergy.value)
        expected = (row.similarity, row.both, row.synergy.value)
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_heads_of_windows_are_compared_within_a_layer(tmp_path: Path) -> None:
    """The tokens of other layers' windows are not the same."""
    shape = {"dim": 16, "depths": [2, 2], "heads": [2, 2]}
    model = untrained("swin-micro", classes=CLASSES, seed=3, overrides=shape)
    with torch.no_grad():
        model.module.head.weight.mul_(20)
    save(model, tmp_path / "model" / "model.safetensors")
    line = (
        f"ablate {tmp_path / 'model'} --data digits --limit 24 --predicted --replace zero "
        "--units head"
    )
    pairs = ran(tmp_path / "out", f"{line} --no-patch --no-curves --pairs 8").pairs
    assert len(pairs) == 8 * 7 / 2
    for row in pairs:
        assert (row.similarity is None) == (row.first[1] != row.second[1])


def test_a_loss_that_is_not_finite_is_measured_again_by_a_resumed_run(
    tiny_vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (
        f"ablate {tiny_vit} --data digits --limit 4 --replace zero --units head --no-patch "
        "--no-curves --pairs 0"
    )
    plain = torch.logaddexp  # the last step of the cross-entropy, of sets of heads by image

    def broken_without_heads(odds: Tensor, zero: Tensor) -> Tensor:
        unchanged = len(odds) == 1
        return plain(odds, zero) + (0.0 if unchanged else torch.inf)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "logaddexp", broken_without_heads)
        assert ran(tmp_path / "out", line, code=1).status == "failed"
    assert gone_on(tmp_path / "out", line).units == ran(tmp_path / "whole", line).units

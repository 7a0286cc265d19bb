"""Variants by pixels, imputation as in the grad-cam package, and the rules for maps to pass."""

import pytest
import torch
from scipy.sparse import csc_matrix
from scipy.sparse.linalg import spsolve
from torch import Tensor
from torch.nn import functional as F

from tests.kit.map_rows import FALLING, STAGES, STAYING
from tests.kit.tiny import images, ours, timm_model
from vitlens import Model
from vitlens.analysis.faithfulness.checks import Judgement, Stage, judged_cascade, judged_stability
from vitlens.analysis.faithfulness.imputation import TOLERANCE, impute
from vitlens.analysis.faithfulness.removal import (
    SHARES,
    Variants,
    both_orders,
    faithfulness,
    substrate_images,
)
from vitlens.errors import InputError, UnsupportedError
from vitlens.uncertainty import Estimate, wilson

SAME = {"atol": 2e-5, "rtol": 1e-4}
MODELS = {
    "ours": ours,
    "mean": lambda: ours(pooling="mean"),
    "distilled": lambda: timm_model("deit_tiny_distilled_patch16_224"),
    "rotary": lambda: timm_model("eva02_tiny_patch14_224"),
    "swin": lambda: timm_model("swin_tiny_patch4_window7_224"),
}


def grid_of(model: Model) -> tuple[int, int]:
    """Return the grid of a model; of a model of windows that of a ViT of its size."""
    return model.layout.grid if model.anatomy.layout else (8, 8)


@torch.no_grad()
def by_pixels(
    model: Model, batch: Tensor, which: Tensor, removed: Tensor, substrate: str
) -> Tensor:
    """Return the logits of each variant, put together from pixels."""
    cells = removed.view(-1, 1, *grid_of(model)).float()
    holes = F.interpolate(cells, size=model.input_size, mode="nearest-exact") > 0.5
    if substrate == "imputed":
        return model(impute(batch[which], holes))
    return model(torch.where(holes, substrate_images(batch, substrate)[which], batch[which]))


def variants(model: Model, count: int = 11, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = grid_of(model)
    removed = torch.rand(count, rows * columns, generator=torch.Generator().manual_seed(3)) < 0.5
    removed[0], removed[1] = False, torch.arange(rows * columns) > 0
    removed[-1] = removed[-1 - batch]  # the same variant again
    return images(model.input_size, batch=batch), torch.arange(count) % batch, removed


@pytest.mark.parametrize(
    ("name", "substrate"),
    [*((name, "mean") for name in MODELS if name != "ours"), ("ours", "blur"), ("ours", "black")],
)
def test_variants_are_those_that_are_put_together_from_pixels(name, substrate):
    model = MODELS[name]()
    batch, which, removed = variants(model)
    logits = Variants(model, batch, substrate=substrate, batch_size=4).logits(which, removed)
    torch.testing.assert_close(logits, by_pixels(model, batch, which, removed, substrate), **SAME)
    if name == "swin":
        with pytest.raises(UnsupportedError):
            Variants(model, images(), substrate="absent")


@torch.no_grad()
def test_absent_patches_are_no_tokens():
    """By hand: the model's own blocks and head on the tokens that stay."""
    model = ours()
    batch, which, removed = variants(model)
    logits = Variants(model, batch, substrate="absent", batch_size=2).logits(which, removed)
    module = model.module
    for row, index, gone in zip(logits, which, removed):
        tokens = module.tokens(model.prepare(batch[index : index + 1]))[
            :, torch.cat([torch.tensor([True]), ~gone])
        ]
        for block in module.blocks:
            tokens = block(tokens)
        torch.testing.assert_close(row, module.forward_head(module.norm(tokens))[0], **SAME)


def test_images_of_another_size_are_resized_first():
    model = ours()
    batch, which, removed = variants(model)
    large = F.interpolate(batch, size=(64, 96), mode="bilinear")
    small = F.interpolate(
        large, size=model.input_size, mode="bilinear", antialias=True, align_corners=False
    )
    logits = Variants(model, large).logits(which, removed)
    expected = Variants(model, small).logits(which, removed)
    torch.testing.assert_close(logits, expected)


def test_the_curves_of_imputed_patches_are_those_of_a_plain_loop():
    """Of other substrates: tests/public/faithfulness."""
    model = ours()
    batch = images((32, 48), batch=3)
    targets = torch.tensor([0, 4, 2])
    maps = [torch.rand(3, 4, 3, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    results = faithfulness(model, batch, targets, maps, substrate="imputed", batch_size=5)
    counts = torch.tensor([round(12 * share) for share in SHARES])
    for one, result in zip(maps, results):
        for curve, sign in ((result.deletion, 1), (result.least_first, -1)):
            assert curve.shares.tolist() == pytest.approx((counts / 12).tolist())
            for index in range(3):  # without ties there is one order
                ranks = (sign * one[index]).flatten().argsort(descending=True).argsort()
                answers = by_pixels(
                    model,
                    batch,
                    torch.full((len(counts),), index),
                    ranks < counts[:, None],
                    "imputed",
                )
                expected = answers.softmax(-1)[:, targets[index]]
                # of the pixels
                torch.testing.assert_close(curve.probability[index], expected, atol=1e-4, rtol=1e-3)
                assert torch.equal(curve.predicted[index], answers.argmax(-1))
                assert torch.equal(curve.kept[index], answers.argmax(-1) == targets[index])


def test_an_image_does_not_depend_on_its_neighbours_or_the_other_maps():
    model = ours()
    batch = images((32, 48), batch=3)
    targets = torch.tensor([1, 3, 0])
    # with ties
    maps = torch.rand(3, 4, 3, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    (together, _) = faithfulness(model, batch, targets, [maps, maps.flip(0)], steps=4)
    assert together.deletion.shares.tolist() == [0, 0.25, 0.5, 0.75, 1]
    (alone,) = faithfulness(model, batch[1:2], targets[1:2], [maps[1:2]], steps=4)
    torch.testing.assert_close(
        together.deletion.probability[1:2], alone.deletion.probability, atol=1e-6, rtol=1e-5
    )


def test_ranks_and_ties():
    maps = torch.tensor([[[0.1, 0.9], [0.5, 0.5]]])
    first, last = both_orders(maps, (2, 2), images=1)
    assert (int(first[0, 1]), int(first[0, 0])) == (0, 3)
    assert torch.equal(last, 3 - first)
    ties = {
        tuple(both_orders(maps, (2, 2), images=1, seed=seed)[0][0].tolist()) for seed in range(8)
    }
    assert len(ties) == 2  # the two that tie stand either way, by the seed
    constant = {
        tuple(both_orders(torch.ones(1, 2, 2), (2, 2), images=1, seed=s)[0][0].tolist())
        for s in range(20)
    }
    assert len(constant) > 5


@pytest.mark.parametrize(
    ("maps", "more"),
    [
        (torch.rand(3, 4, 3), {}),
        (torch.rand(2, 4, 3) / torch.tensor([1.0, 0.0])[:, None, None], {}),
        (torch.rand(2, 4, 3), {"steps": 0}),
    ],
)
def test_refusals(maps, more):
    with pytest.raises(InputError):
        faithfulness(ours(), images((32, 48)), torch.tensor([1, 3]), [maps], **more)


def holes(kind: str, size: tuple[int, int] = (24, 20)) -> Tensor:
    """Return one hole in the middle, a chequered hole, or everything except a corner."""
    rows = torch.arange(size[0])[:, None]
    columns = torch.arange(size[1])
    shapes = {
        "middle": (rows >= 6) & (rows < 18) & (columns >= 5) & (columns < 15),
        "chequers": (rows * 6 // size[0] + columns * 5 // size[1]) % 2 == 0,
        "corner": (rows >= 4) | (columns >= 4),
    }
    return shapes[kind][None, None]


def package_fills(image: Tensor, hole: Tensor) -> Tensor:
    """Solve the grad-cam package's linear system with scipy, as it fails with NumPy 2."""
    from pytorch_grad_cam.metrics.road import NoisyLinearImputer, neighbors_weights

    present = (~hole).float().numpy()
    matrix, right = NoisyLinearImputer.setup_sparse_system(
        present, image.numpy(), neighbors_weights
    )
    filled = image.clone()
    filled[:, hole] = torch.from_numpy(spsolve(csc_matrix(matrix), right)).to(image).T
    return filled


@pytest.mark.parametrize(
    ("kind", "size"),  # with one, no and three coarser grids
    [
        ("middle", (24, 20)),
        ("chequers", (23, 17)),
        ("corner", (23, 17)),
        ("chequers", (96, 80)),
        ("corner", (96, 80)),
    ],
)
def test_holes_are_filled_as_the_grad_cam_package_does(kind, size):
    # one corner of 96 x 80 is beyond float32's rounding
    batch = images(size).double()
    hole = holes(kind, size)
    filled_images = impute(batch, hole.expand(2, -1, -1, -1), noise=0.0)
    for image, filled in zip(batch, filled_images):
        torch.testing.assert_close(
            filled, package_fills(image, hole[0, 0]), atol=TOLERANCE, rtol=0.0
        )


def test_imputed_images():
    """Pixels outside the hole stay, each image is filled separately, filled holes are noisy."""
    batch = images((24, 20), batch=3)
    hole = torch.cat([holes(kind) for kind in ("middle", "chequers", "corner")])
    filled = impute(batch, hole)
    assert torch.equal(filled.masked_select(~hole), batch.masked_select(~hole))
    for index in range(3):
        alone = impute(batch[index : index + 1], hole[index : index + 1])
        torch.testing.assert_close(filled[index : index + 1], alone, atol=1e-3, rtol=0.0)
    even = torch.full_like(batch, 0.4)
    torch.testing.assert_close(impute(even, hole, noise=0.0), even, atol=1e-3, rtol=0.0)
    assert 0.005 < impute(even, hole).masked_select(hole).std() < 0.015
    with pytest.raises(InputError, match="without any"):
        impute(batch, torch.ones_like(hole))


def judged(
    *means: float, kept_share: float | None = None, n: int = 32, names: tuple[str, ...] = STAGES
) -> Judgement:
    estimates = [Estimate(mean, mean - 0.02, mean + 0.02, n, "") for mean in means]
    return judged_cascade(
        [Stage(name, estimate, kept_share) for name, estimate in zip(names, estimates)]
    )


@pytest.mark.parametrize(
    ("means", "state", "decisive"),
    [
        (FALLING, "pass", 2),
        # below 0.5 only in the lower half; the least down to the middle block decides
        (
            STAYING,
            "fail",
            2,
        ),
        ((1.0, 0.4, 0.9, 0.9, 0.2, 0.0), "pass", 1),
        # all weights random, and the maps are the old ones
        (
            (0.1, 0.1, 0.1, 0.1, 0.1, 0.6),
            "fail",
            5,
        ),
        ((0.9, 0.8, 0.49, 0.1, 0.1, 0.0), "inconclusive", 2),  # its interval holds 0.5
        ((0.1, 0.1, 0.1, 0.1, 0.1, 0.49), "inconclusive", 0),
    ],
)
def test_the_rule_of_the_cascade(means, state, decisive):
    judgement = judged(*means)
    assert (judgement.state, judgement.value.value) == (state, means[decisive])


def test_a_cascade_that_could_not_have_failed_and_the_least_similarity_down_to_the_middle_block():
    for means in (FALLING, STAYING):
        assert {
            judged(*means, n=n, kept_share=kept_share).state
            for n, kept_share in ((9, None), (32, 0.9))
        } == {"inconclusive"}
    for names in (("head", "block 1", "block 0", "embedding"), ("head", "block 0")):
        assert judged(0.9, 0.89, 0.88, 0.87, names=names).value.value == 0.89


@pytest.mark.parametrize(
    ("correlation", "jumped", "state"),
    [
        (Estimate(0.9, 0.8, 0.95), wilson(0, 16), "pass"),
        (Estimate(0.9, 0.8, 0.95), wilson(12, 16), "fail"),
        (Estimate(0.3, 0.2, 0.4), wilson(0, 16), "fail"),
        (Estimate(0.9, 0.8, 0.95), wilson(4, 16), "inconclusive"),
        (Estimate(0.6, 0.4, 0.8), wilson(0, 16), "inconclusive"),
        (Estimate(0.9, 0.8, 0.95), wilson(9, 9), "inconclusive"),  # few images
        (None, None, "inconclusive"),
    ],
)
def test_the_rule_of_stability(correlation, jumped, state):
    assert judged_stability(correlation, jumped).state == state

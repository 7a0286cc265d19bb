"""Maps that vitlens did not make: `vitlens.verify` and `explain --maps`.

The game of planted_games has known effects of its patches, so its maps have known verdicts.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit import chefer
from tests.kit import planted_games as games
from tests.kit.chefer import save
from tests.kit.commands import ran, refusal, report
from tests.kit.making import digits, little_vit
from tests.kit.planted_games import CELLS, COUNT
from tests.kit.planted_methods import planted_methods
from tests.kit.saving import no_figures
from tests.kit.select import index_by, select, values_of
from vitlens import Model
from vitlens.errors import DataError, InputError

TARGETS = torch.zeros(COUNT, dtype=torch.long)
NOISE = torch.rand(COUNT, CELLS, CELLS, generator=torch.Generator().manual_seed(5))
SIZES = ("deletion", "insertion", "gap", "road", "relevance_gain", "roc_auc", "pointing", "mass")
LINE = "--verify --no-counterfactuals --composites none --substrate black --other-substrates mean"
NAMES = [f"{index:02}.png" for index in range(COUNT)]


def truth() -> Tensor:
    return games.truth(games.game(), games.pixels(), TARGETS)


def logit_times_input(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    """Return input times gradient, as a user writes it: with `backward`."""
    model(images).gather(1, targets[:, None]).sum().backward()
    return (images * images.grad).sum(1)


def test_a_function_is_judged_as_the_method_of_vitlens_that_does_the_same():
    model = little_vit()
    split = digits("test").limit(12)
    result = vitlens.verify(
        model,
        split,
        methods={"mine": logit_times_input, "input-x-gradient": "input-x-gradient"},
        targets="label",
    )
    mine = select(result.checks, method="mine")
    ours = select(result.checks, method="input-x-gradient")
    assert values_of(mine, "check") == ["imputed", "mean", "weights", "shifts", "object"]
    for row, expected in zip(mine, ours, strict=True):
        assert row.state == expected.state
        assert row.value.value == pytest.approx(expected.value.value, abs=1e-5)
    assert values_of(select(result.stages, method="mine"), "similarity.value") == pytest.approx(
        values_of(select(result.stages, method="input-x-gradient"), "similarity.value"), abs=1e-4
    )
    league = index_by(result.league, "method")
    assert league["mine"].forwards.value == pytest.approx(3, abs=0.5)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_fixed_maps_have_the_numbers_of_the_method_that_made_them(tmp_path):
    """The command and the function, where a method of vitlens gives the same maps."""
    file = save(tmp_path / "mine.npz", truth(), files=np.array(NAMES))
    words = games.write(tmp_path)
    with planted_methods({"saliency": games.truth}):
        line = f"explain {words} {LINE} --method saliency --maps {file}"
        record = ran(tmp_path / "out", line)
        result = vitlens.verify(
            games.game(),
            games.pixels(),
            methods={"mine": truth(), "saliency": "saliency"},
            masks=games.objects(),
        )
    for league in (index_by(record.league, "method"), index_by(result.league, "method")):
        mine = league["mine"]
        for name in SIZES:
            assert getattr(mine, name) == getattr(league["saliency"], name), name
        assert (mine.seconds, mine.forwards, mine.randomisation) == (None, None, None)
    removed = select(record.checks, method="mine")[:2]
    expected = select(record.checks, method="saliency")[:2]
    assert [row.margin for row in removed] == [row.margin for row in expected]
    verdicts = {row[1]: row[2] for row in report(record).first.glance.rows}
    assert verdicts.keys() == {"saliency", "mine"}
    assert verdicts["mine"] == "inconclusive"


@pytest.mark.parametrize(
    ("maps", "state", "lacks"),
    [
        (truth(), "inconclusive", {"fixed maps"}),
        (-truth(), "fail", {"random", "centre", "other images", "fixed maps"}),
        (truth()[:1].expand(COUNT, -1, -1), "fail", {"one map", "fixed maps"}),
        (torch.ones(COUNT, 9, 8), "fail", {"unusable maps", "fixed maps"}),
    ],
    ids=["truth", "reverse", "one map", "uniform"],
)
def test_verdicts_on_fixed_maps(maps, state, lacks):
    """The best is "inconclusive": nothing says whether they depend on the weights."""
    result = vitlens.verify(games.game(), games.pixels(), methods={"mine": maps})
    assert result["mine"].state == state
    assert {word for row in result.checks for word in row.lacks} == lacks
    rows = index_by(result.checks, "check")
    assert (rows["weights"].value, rows["shifts"].value) == (None, None)
    assert not result.stages
    assert not result.stability


def test_a_function_that_uses_the_weights_passes_and_one_that_shows_the_image_does_not():
    methods = {
        "truth": games.truth,
        "image": lambda _model, images, _targets: images.mean(1),
        "stored": lambda _model, images, _targets: truth()[: len(images)].numpy(),
    }
    result = vitlens.verify(games.game(), games.pixels(), methods=methods, batch_size=COUNT)
    weights = {row.method: row.lacks for row in result.checks if row.check == "weights"}
    assert weights == {
        "truth": (),
        "image": ("ignores the weights",),
        "stored": ("ignores the weights",),
    }
    assert result["image"].state == result["stored"].state == "fail"


def test_a_function_has_gradients_of_its_images_whatever_the_caller_does():
    """Of a model with frozen weights, in inference mode, and in training mode."""
    seen = []

    def watched(model: Model, images: Tensor, targets: Tensor) -> Tensor:
        seen.append((images.is_leaf, images.requires_grad, model.training, torch.rand(1).item()))
        model(images).gather(1, targets[:, None]).sum().backward()
        return images.grad.abs().sum(1)

    model = games.game().requires_grad_(False).train()
    images = games.pixels()[:2]
    with torch.inference_mode():
        result = vitlens.verify(model, images, methods={"mine": watched})
    assert set(seen) == {(True, True, False, seen[0][3])}
    assert result.maps["mine"].shape == (2, games.SIDE, games.SIDE)
    assert model.training
    assert torch.equal(images, games.pixels()[:2])


def test_maps_made_elsewhere_are_judged_in_one_command(tmp_path):
    """Of vit-digits: Chefer's maps by a script of its own, noise, the centre and the mean mask."""
    vit = vitlens.load("vit-digits")
    split = digits("test").limit(20)
    (batch,) = split.batches(20)
    state = {name: value.detach() for name, value in vit.module.state_dict().items()}
    maps = chefer.relevance(state, heads=4, pixels=vit.prepare(batch.images), targets=split.labels)
    rows = torch.linspace(-1, 1, 8)
    centre = torch.exp(-4 * (rows[:, None] ** 2 + rows**2)).expand(20, -1, -1)
    files = [
        save(tmp_path / "chefer.npz", maps, targets=split.labels.numpy()),
        save(tmp_path / "noise.npz", NOISE.repeat(2, 1, 1)[:20]),
        save(tmp_path / "middle.npz", centre),
        save(tmp_path / "mean-mask.npz", split.masks.float().mean(0).expand(20, -1, -1)),
    ]
    line = "explain vit-digits --data digits --limit 20 --method attention --verify "
    line += "--no-counterfactuals --composites none --substrate mean --other-substrates none"
    with no_figures():
        record = ran(tmp_path / "out", line + "".join(f" --maps {file}" for file in files))
    verdicts = index_by(record.checks, "method", "check")
    for check in ("imputed", "mean"):
        assert verdicts["chefer", check].state == "pass"
        assert verdicts["noise", check].state == "fail"
        assert "random" in verdicts["noise", check].lacks
        for name in ("middle", "mean-mask"):
            assert verdicts[name, check].lacks == ("one map",)
    assert select(record.checks, method="attention", check="weights")[0].value is not None
    assert values_of(record.shown, "target") == values_of(record.shown, "label")


def test_maps_are_matched_with_images_by_name_in_any_order_and_with_a_limit(tmp_path):
    words = games.write(tmp_path)
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(2))
    maps = truth()
    names = np.array([f"elsewhere/{NAMES[index]}" for index in order])
    file = save(tmp_path / "mine.npz", maps[order], files=names, targets=np.zeros(COUNT, int))
    with planted_methods({"saliency": games.truth}):
        for limit, count in (("", COUNT), ("--limit 5", 5)):
            out = tmp_path / f"out{limit[-1:]}"
            record = ran(out, f"explain {words} --method saliency --maps a={file} {limit}")
            _, mine = record.methods
            stored = record.maps["game"].maps
            np.testing.assert_allclose(stored[1], stored[0], atol=1e-6)
            assert (mine.method, mine.maps, mine.matched) == ("a", count, "name")
            assert (mine.source, mine.seconds) == ("mine.npz", None)


def changes_weights(model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    model.module.head.weight.data[0, 0] += 1
    return images[:, 0]


def changes_mode(model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    model.train()
    return images[:, 0]


def swaps_a_layer(model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    model.module.stem = nn.Identity()
    return images[:, 0]


def leaves_a_hook(model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    model.module.head.register_forward_hook(lambda *_: None)
    return images[:, 0]


def changes_a_buffer(model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    model.std.mul_(2)
    return images[:, 0]


def replaces_forward(model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    model.module.forward = lambda pixels: pixels.flatten(1)[:, :2]
    return images[:, 0]


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (changes_weights, "module.head.weight"),
        (changes_mode, "mode"),
        (swaps_a_layer, "modules"),
        (leaves_a_hook, "hooks"),
        (changes_a_buffer, "buffer 'std'"),
        (replaces_forward, "forward"),
    ],
)
def test_a_method_that_changes_the_model_is_refused_and_the_model_is_as_before(function, word):
    model = games.game()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(games.pixels())
    model.module.blocks[0].train()
    modes = [module.training for module in model.modules()]
    with pytest.raises(InputError, match=rf"'mine' changes .*{word}") as refused:
        vitlens.verify(model, games.pixels(), methods={"mine": function})
    assert "\n" not in str(refused.value)
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(model(games.pixels()), logits)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())


def test_a_method_that_fails_leaves_the_model_as_before_and_is_named_with_its_line():
    def broken(model: Model, _images: Tensor, _targets: Tensor) -> Tensor:
        model.module.head.weight.data.zero_()
        raise KeyError("no such layer\nsecond line")

    model = games.game()
    with pytest.raises(InputError, match=r"'mine'.* line \d+ of test_external\.py.*KeyError"):
        vitlens.verify(model, games.pixels(), methods={"mine": broken})
    assert torch.equal(model.module.head.weight[0], games.worth())


def returning(value: Callable[[Tensor], object]) -> Callable[..., object]:
    return lambda _model, images, _targets: value(images)


def with_nan(maps: Tensor) -> Tensor:
    maps = maps.clone()
    maps[3, 0, 0] = torch.nan
    return maps


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({}, "found none"),
        ({"random": NOISE}, "'random'"),
        ({"relevance": NOISE}, "'relevance'"),
        ({"my maps": NOISE}, "'my maps'"),
        ({3: NOISE}, "found 3"),
        ({"mine": "saliencyy"}, "did you mean 'saliency'"),
        ({"mine": NOISE[:4]}, "for 16 images, found 4"),
        ({"mine": NOISE[:, None]}, r"maps\[:, 0\]"),
        ({"mine": NOISE[:, None].expand(-1, 3, -1, -1)}, r"maps\.sum\(1\)"),
        ({"mine": NOISE.flatten(1)}, "reshape"),
        ({"mine": NOISE > 0.5}, "found bool"),
        ({"mine": NOISE.to(torch.complex64)}, "found complex64"),
        ({"mine": NOISE.numpy().astype(object)}, "found object"),
        ({"mine": NOISE.tolist()}, "found list"),
        ({"mine": with_nan(NOISE)}, r"NaN or infinity in 1 of 16 \(image 3\)"),
        ({"mine": returning(lambda _: None)}, "found NoneType"),
        ({"mine": returning(lambda images: images)}, r"maps\.sum\(1\)"),
        ({"mine": returning(lambda images: images[:1, 0])}, "'mine' for 16 images, found 1"),
        ({"mine": returning(lambda images: images[:, 0] / 0)}, "NaN or infinity in 16 of 16"),
        ({"mine": lambda _: None}, "TypeError"),
    ],
)
def test_wrong_methods_are_one_line(methods, words):
    with pytest.raises(InputError, match=words) as refused:
        vitlens.verify(games.game(), games.pixels(), methods=methods, batch_size=COUNT)
    assert "\n" not in str(refused.value)


def test_maps_coarser_than_the_patches_and_wrong_masks_are_refused():
    images = torch.rand(2, 3, 32, 32)
    with pytest.raises(InputError, match="at least 4x4 values, one per patch, found 3x4"):
        vitlens.verify(little_vit(), images, methods={"mine": torch.rand(2, 3, 4)})
    for masks in (games.objects()[:3], games.objects().float()):
        with pytest.raises(DataError, match="expected masks"):
            vitlens.verify(games.game(), games.pixels(), methods={"mine": NOISE}, masks=masks)


FILES: dict[str, tuple[dict[str, object], str]] = {
    "no maps": ({"map": NOISE}, "expected an array 'maps'"),
    "fewer": ({"maps": NOISE[:4]}, "for 16 images, found 4; add the names"),
    "pickled": ({"maps": np.array([{}])}, "object"),
    "words": ({"maps": np.array(NAMES)}, "real numbers"),
    "yes or no": ({"maps": (NOISE > 0.5).numpy()}, "found bool"),
    "not finite": ({"maps": with_nan(NOISE)}, "NaN or infinity in 1 of 16"),
    "one axis too many": ({"maps": NOISE[:, None]}, "maps[:, 0]"),
    "names of others": ({"maps": NOISE, "files": np.array([*NAMES[1:], "x.png"])}, "00.png"),
    "an image too many": (
        {"maps": NOISE.repeat(2, 1, 1)[:17], "files": np.array([*NAMES, "x.png"])},
        "found one of 'x.png'",
    ),
    "a name twice": ({"maps": NOISE, "files": np.array([*NAMES[1:], "01.png"])}, "twice"),
    "fewer names": ({"maps": NOISE, "files": np.array(NAMES[1:])}, "shape (16,)"),
    "numbers as names": ({"maps": NOISE, "files": np.arange(COUNT)}, "strings"),
    "classes beyond": ({"maps": NOISE, "targets": np.full(COUNT, 2)}, "from 0 to 1"),
    "classes in words": ({"maps": NOISE, "targets": np.array(NAMES)}, "class indices"),
}


@pytest.fixture(scope="module")
def game_words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return games.write(tmp_path_factory.mktemp("game"))


@pytest.mark.parametrize("name", FILES)
def test_wrong_files_are_one_line(name, game_words, tmp_path, capsys):
    arrays, words = FILES[name]
    np.savez(tmp_path / "mine.npz", **{key: np.asarray(value) for key, value in arrays.items()})
    line = f"explain {game_words} --method saliency --maps {tmp_path / 'mine.npz'}"
    assert words in refusal(capsys, line)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--maps {place}/gone.npz", "no file"),
        ("--maps {place}/relevance.npz", "--maps NAME="),
        ("--maps random={place}/relevance.npz", "'random'"),
        ("--maps a={place}/relevance.npz --maps a={place}/relevance.npz", "'a' 2 times"),
        ("--maps a={place}/relevance.npz --auto", "--auto"),
        ("--maps a={place}/relevance.npz --target 1", "for 16 of 16 images"),
        ("--maps a={place}/text.npz", "numpy.savez"),
    ],
)
def test_wrong_options_are_one_line(words, expected, game_words, tmp_path, capsys):
    save(tmp_path / "relevance.npz", NOISE, targets=np.zeros(COUNT, int))
    (tmp_path / "text.npz").write_text("no archive")
    line = f"explain {game_words} --method saliency {words.format(place=tmp_path)}"
    assert expected in refusal(capsys, line)


def test_one_model_only(tmp_path, capsys):
    line = f"explain vit-digits cnn-digits --data digits --maps {tmp_path / 'mine.npz'}"
    assert "expected one model with --maps, found 2" in refusal(capsys, line)

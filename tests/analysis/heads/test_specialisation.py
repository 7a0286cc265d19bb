"""The rules on attention made to be each kind, streamed as a model's attention is."""

import math

import pytest
import torch
from torch import Tensor

from tests.analysis.made import made_model, numbered, uniform
from tests.lens.tiny import images as pictures
from tests.lens.tiny import ours, timm_model, torchvision_swin
from vitlens.analysis.heads.geometry import Geometry, offset_counts
from vitlens.analysis.heads.labels import LABELS, MIXED, THRESHOLD, rules
from vitlens.analysis.heads.specialisation import (
    Specialisation,
    explained_by_offset,
    label_of,
    specialise,
    uniform_attention,
)
from vitlens.analysis.heads.statistics import Statistics, Stream, statistics
from vitlens.models.model import Model

IMAGES = 12
LAYOUTS = [((8, 8), 0), ((8, 8), 1), ((8, 8), 5), ((6, 10), 0), ((6, 10), 1), ((6, 10), 5), ((10, 6), 1)]


class Maker:
    """Weights (images, query, key) of one head, rows of the prefix uniform."""

    def __init__(self, grid: tuple[int, int], prefix: int, *, images: int = IMAGES, seed: int = 0) -> None:
        self.grid, self.prefix, self.images = grid, prefix, images
        self.patches = grid[0] * grid[1]
        self.tokens = self.patches + prefix
        self.generator = torch.Generator().manual_seed(seed)
        places = torch.arange(self.patches)
        self.down, self.across = places // grid[1], places % grid[1]

    def head(self, patches: Tensor) -> Tensor:
        """patches: what patches do to patches, (patches, patches) or one for each image."""
        weights = uniform(self.images, 1, self.tokens)[:, 0].clone()
        weights[:, self.prefix :] = 0
        weights[:, self.prefix :, self.prefix :] = patches / patches.sum(-1, keepdim=True)
        return weights

    def neighbour(self, across: int) -> Tensor:
        """All on the patch beside; on itself where there is none."""
        beside = self.across + across
        inside = (beside >= 0) & (beside < self.grid[1])
        key = torch.arange(self.patches) + torch.where(inside, across, 0)
        return self.head(torch.eye(self.patches)[key])

    def random_keys(self) -> Tensor:
        """Another key for every query of every image."""
        keys = torch.randint(self.patches, (self.images, self.patches), generator=self.generator)
        return self.head(torch.eye(self.patches)[keys])

    def object(self, size: int = 15) -> Tensor:
        """The same patches for all queries of an image, others in each image."""
        inside = torch.zeros(self.images, 1, self.patches)
        for image in range(self.images):
            inside[image, 0, torch.randperm(self.patches, generator=self.generator)[:size]] = 1
        return self.head(inside.expand(-1, self.patches, -1) + 1e-4)

    def sink(self, keys: tuple[int, ...], share: float = 1.0) -> Tensor:
        """A share of all patches' attention on these tokens, the rest even."""
        weights = uniform(self.images, 1, self.tokens)[:, 0].clone()
        weights[:, self.prefix :] *= 1 - share
        weights[:, self.prefix :, list(keys)] += share / len(keys)
        return weights

    def mixed(self) -> Tensor:
        """A part on itself, a part on one key, the rest even: no rule fits."""
        weights = 0.3 * self.sink((self.tokens - 2,)) + 0.3 * uniform(self.images, 1, self.tokens)[:, 0]
        weights[:, self.prefix :] += 0.4 * torch.eye(self.tokens)[self.prefix :]
        weights[:, : self.prefix] = 1 / self.tokens
        return weights

    def kinds(self) -> dict[str, tuple[str, Tensor]]:
        """By name: the label it should get, and the weights."""
        apart = (self.down[:, None] - self.down).square() + (self.across[:, None] - self.across).square()
        ones = torch.ones(self.patches, self.patches)
        made = {
            "previous": ("previous", self.neighbour(-1)),
            "next": ("next", self.neighbour(1)),
            "same row": ("same row", self.head((self.down[:, None] == self.down).float())),
            "same column": ("same column", self.head((self.across[:, None] == self.across).float())),
            "gaussian": ("local", self.head(torch.exp(-apart / (2 * 0.8**2)))),
            "square around": ("local", self.head(((apart <= 2) & (apart > 0)).float())),
            "self": ("self", self.head(torch.eye(self.patches))),
            "uniform": ("global", uniform(self.images, 1, self.tokens)[:, 0]),
            "nearly uniform": ("global", self.head(ones + 0.2 * torch.rand(ones.shape, generator=self.generator))),
            "one sink": ("sink", self.sink((self.prefix + 4,))),
            "two sinks": ("sink", self.sink((self.prefix + 4, self.tokens - 1), 0.8)),
            "random keys": ("content-dependent", self.random_keys()),
            "object": ("content-dependent", self.object()),
            "mixed": (MIXED, self.mixed()),
        }
        if self.prefix:
            made["CLS"] = ("CLS", self.sink((0,)))
            made["mostly CLS"] = ("CLS", self.sink((0,), 0.7))
        if self.prefix > 1:
            made["register"] = ("sink", self.sink((2,)))
        return made


def model_of(heads: list[Tensor], grid: tuple[int, int], prefix: int) -> Model:
    return made_model(torch.stack(heads, 1), grid=grid, prefix=prefix)


def streamed(heads: list[Tensor], grid: tuple[int, int], prefix: int, *, renormalise: bool = True) -> Statistics:
    model = model_of(heads, grid, prefix)
    return statistics(model, numbered(model, len(heads[0])), renormalise=renormalise, batch_size=5)


def score(found: Specialisation, rule: str, head: int = 0) -> float:
    return found.all_scores[rule][0, head].item()


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("grid", "prefix"), LAYOUTS)
def test_each_kind_gets_its_label(grid, prefix, renormalise):
    kinds = Maker(grid, prefix).kinds()
    found = specialise(streamed([weights for _, weights in kinds.values()], grid, prefix, renormalise=renormalise))
    labels = dict(zip(kinds, found.labels[0]))
    assert labels == {name: label for name, (label, _) in kinds.items()}
    assert {label for label, _ in kinds.values()} >= set(LABELS) - ({"CLS"} if not prefix else set())
    for head, label in enumerate(found.labels[0]):
        expected = max(score(found, rule, head) for rule in rules()) if label == MIXED else score(found, label, head)
        assert found.scores[0][head] == pytest.approx(expected)
        assert (found.scores[0][head] >= THRESHOLD) == (label != MIXED)


@pytest.mark.parametrize(("grid", "prefix"), LAYOUTS)
def test_a_perfect_head_scores_one(grid, prefix):
    made = Maker(grid, prefix)
    kinds = made.kinds()
    names = ["self", "same row", "same column", "one sink", "uniform", *(["CLS"] if prefix else [])]
    found = specialise(streamed([kinds[name][1] for name in names], grid, prefix))
    assert list(found.labels[0]) == [kinds[name][0] for name in names]
    assert found.scores[0] == pytest.approx([1.0] * len(names), abs=1e-4)


@pytest.mark.parametrize(("grid", "prefix"), LAYOUTS)
def test_uniform_attention_scores_nothing_but_global(grid, prefix):
    found = specialise(streamed([Maker(grid, prefix).kinds()["uniform"][1]], grid, prefix))
    for rule in rules():
        assert score(found, rule) == pytest.approx(1 if rule == "global" else 0, abs=2e-5), rule
    ratios = found.ratios[0][0]
    torch.testing.assert_close(ratios, torch.ones_like(ratios), atol=1e-5, rtol=0)


@pytest.mark.parametrize("share", [0.2, 0.45, 0.55, 0.9])
@pytest.mark.parametrize(("grid", "prefix"), LAYOUTS)
def test_scores_are_what_lies_beyond_chance(grid, prefix, share):
    """A share of the attention on one part, the rest even: the score is the share, by hand."""
    made = Maker(grid, prefix)
    even = made.head(torch.ones(made.patches, made.patches))
    kinds = made.kinds()
    names = {"self": "self", "same row": "same row", "same column": "same column"}
    found = specialise(streamed([share * kinds[name][1] + (1 - share) * even for name in names], grid, prefix))
    for head, (name, rule) in enumerate(names.items()):
        assert score(found, rule, head) == pytest.approx(share, abs=1e-5), name
    sink = specialise(streamed([made.sink((prefix + 4,), share)], grid, prefix))
    assert score(sink, "sink") == pytest.approx(share, abs=1e-5)
    if prefix:
        found = specialise(streamed([made.sink((0,), share)], grid, prefix))
        assert score(found, "CLS") == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("across", [-1, 1])
@pytest.mark.parametrize("grid", [(8, 8), (6, 10)])
def test_neighbours_by_hand(grid, across):
    """Of c columns one has no patch beside it; chance is the share of pairs that lie side by side."""
    made, columns = Maker(grid, 1), grid[1]
    found = specialise(streamed([made.neighbour(across)], grid, 1))
    chance = (columns - 1) / columns / made.patches
    expected = ((columns - 1) / columns - chance) / (1 - chance)
    assert score(found, "previous" if across < 0 else "next") == pytest.approx(expected, abs=1e-6)
    other = score(found, "next" if across < 0 else "previous")
    assert other == pytest.approx(-chance / (1 - chance), abs=1e-6)
    assert score(found, "self") < 0.2


@pytest.mark.parametrize("grid", [(8, 8), (6, 10)])
def test_local_is_one_minus_the_distance_over_uniforms(grid):
    kinds = Maker(grid, 1).kinds()
    table = streamed([kinds["gaussian"][1]], grid, 1)
    found = specialise(table)
    expected = 1 - table.distance[0, 0] / table.uniform_distance()[0]
    assert score(found, "local") == pytest.approx(expected.item(), abs=1e-9)
    assert expected > 0.5


@pytest.mark.parametrize("prefix", [1, 5])
def test_mass_on_the_prefix_is_no_nearness(prefix):
    """Distances that count CLS as 0 px must not make a head local: the scores are those of renormalised ones."""
    made = Maker((6, 10), prefix)
    heads = [made.sink((prefix - 1,), share) for share in (0.3, 0.45, 0.8)]
    one, other = (specialise(streamed(heads, (6, 10), prefix, renormalise=flag)) for flag in (True, False))
    assert one.labels == other.labels
    for rule in rules():
        torch.testing.assert_close(one.all_scores[rule], other.all_scores[rule], atol=1e-6, rtol=0)


def explained_by_hand(weights: Tensor, grid: tuple[int, int]) -> float:
    """R² of the mean weight at each offset over all pairs of all images, (images, query, key)."""
    values: dict[tuple[int, int], list[float]] = {}
    for image in weights.tolist():
        for query, row in enumerate(image):
            for key, weight in enumerate(row):
                offset = (key // grid[1] - query // grid[1], key % grid[1] - query % grid[1])
                values.setdefault(offset, []).append(weight)
    everything = [weight for found in values.values() for weight in found]
    mean = sum(everything) / len(everything)
    total = sum((weight - mean) ** 2 for weight in everything)
    left = sum((weight - sum(found) / len(found)) ** 2 for found in values.values() for weight in found)
    return 1 - left / total


@pytest.mark.parametrize("name", ["random keys", "object", "gaussian", "mixed", "previous", "one sink"])
@pytest.mark.parametrize(("grid", "prefix"), [((4, 6), 0), ((6, 4), 1), ((5, 5), 5)])
def test_what_offsets_explain_is_the_share_of_variance(grid, prefix, name):
    weights = Maker(grid, prefix, images=4).kinds()[name][1]
    found = specialise(streamed([weights], grid, prefix))
    expected = explained_by_hand(weights[:, prefix:, prefix:], grid)
    assert 1 - score(found, "content-dependent") == pytest.approx(expected, abs=1e-4)


def test_weights_that_depend_on_the_offset_alone_are_explained():
    chance, share = uniform_attention(Geometry((4, 5), (2.0, 3.0))), offset_counts((4, 5)) / 20
    torch.testing.assert_close(chance.share, share)
    torch.testing.assert_close(chance.mass, share / 20)
    assert chance.energy == pytest.approx(1 / 20)
    weight = torch.rand(7, 9, generator=torch.Generator().manual_seed(0)).double()  # of each offset
    assert explained_by_offset(weight * share, float((weight**2 * share).sum()), chance) == pytest.approx(1)
    assert explained_by_offset(share / 20, 1 / 20, chance) == 1.0  # uniform: nothing to explain
    assert explained_by_offset(share / 20, 1.0, chance) == pytest.approx(0)  # one random key a query
    assert explained_by_offset(0 * share, 0.0, chance) == 1.0  # nothing on patches


def test_ratios_by_hand():
    """Mean weight at an offset over that of uniform attention; self attention: patches times as much on itself."""
    made = Maker((3, 4), 0)
    found = specialise(streamed([made.head(torch.eye(12)), made.neighbour(1)], (3, 4), 0))
    itself, beside = found.ratios[0]
    assert itself.shape == (5, 7)
    assert itself[2, 3].item() == pytest.approx(12)
    assert itself.sum().item() == pytest.approx(12)
    assert beside[2, 4].item() == pytest.approx(12)  # each pair that is side by side has all of its row
    assert beside[2, 3].item() == pytest.approx(12 * 1 / 4)  # a quarter of the patches has none beside


def test_the_first_rule_that_is_met_names_the_head():
    scores = dict.fromkeys(rules(), 0.1)
    assert label_of(scores) == (MIXED, 0.1)
    assert label_of({**scores, "local": 0.7, "content-dependent": 0.9}) == ("local", 0.7)
    assert label_of({**scores, "CLS": 0.5, "sink": 1.0}) == ("CLS", 0.5)
    assert label_of({**scores, "global": 0.499}) == (MIXED, 0.499)
    assert tuple(rules()) == (
        "CLS", "sink", "self", "previous", "next", "same row", "same column", "local", "global", "content-dependent",
    )  # fmt: skip


@pytest.mark.parametrize("grid", [(1, 7), (7, 1), (1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_grids_of_one_row_column_or_patch(grid, prefix):
    made = Maker(grid, prefix)
    heads = [
        uniform(IMAGES, 1, made.tokens)[:, 0],
        made.head(torch.eye(made.patches)),
        made.neighbour(-1),
        made.random_keys(),
    ]
    found = specialise(streamed(heads, grid, prefix))
    assert set(found.labels[0]) <= set(LABELS)
    for rule in rules():
        assert torch.isfinite(found.all_scores[rule]).all(), rule
    assert found.labels[0][0] == "global"
    if made.patches > 2:
        assert found.labels[0][1] == "self"
        assert found.labels[0][2] == ("previous" if grid[1] > 1 else "self")
    if grid[0] == 1:  # all patches are in one row: no part of what chance gives
        assert found.all_scores["same row"][0].tolist() == [0.0] * 4


FLAT = {
    "ours": ours,
    "registers": lambda: ours(registers=4),
    "swin": lambda: timm_model("swin_tiny_patch4_window7_224", img_size=(32, 48)),
    "torchvision-swin": torchvision_swin,
}


def flattened(model: Model) -> Model:
    """Queries of zeros and no bias: uniform attention, wherever the masks of windows let it go."""
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "qkv" in name or "relative_position_bias" in name:
                parameter.zero_()
    return model


@pytest.mark.parametrize("name", FLAT)
def test_uniform_attention_is_chance_in_windows_too(name):
    """Also where a shifted window is cut in parts, so that some patches see fewer than others."""
    table = statistics(flattened(FLAT[name]()), pictures(FLAT[name]().input_size))
    found = specialise(table)
    for layer, site in enumerate(table.sites):
        assert set(found.labels[layer]) == {"global"}
        uniform_distance = table.uniform_distance()[layer].expand(site.heads)
        torch.testing.assert_close(table.distance[layer, : site.heads], uniform_distance, atol=0, rtol=1e-5)
        for rule in set(rules()) - {"global"}:
            assert found.all_scores[rule][layer, : site.heads].abs().max() < 1e-5, rule
        ratios = found.ratios[layer]
        torch.testing.assert_close(ratios, torch.ones_like(ratios), atol=1e-5, rtol=0)


def test_layers_without_a_place_have_no_label():
    model = timm_model("vit_base_patch16_siglip_224")
    found = specialise(statistics(model, pictures()))
    assert [len(labels) for labels in found.labels] == [2, 2, 0]
    assert [len(scores) for scores in found.scores] == [2, 2, 0]
    assert found.ratios[2] is None
    for table in found.all_scores.values():
        assert table.shape == (3, 2)
        assert table[:2].isfinite().all()
        assert table[2].isnan().all()


@pytest.mark.parametrize(("across", "label"), [(-1, "previous"), (1, "next")])
def test_windows_of_swin_that_all_look_aside(across, label):
    """Made by the bias that Swin adds at each offset of a window."""
    model = flattened(timm_model("swin_tiny_patch4_window7_224"))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if name.endswith("relative_position_bias_table"):
                parameter.view(7, 7, -1)[3, 3 - across] = 40  # timm counts query minus key
    found = specialise(statistics(model, pictures()))
    chance = 3 / 4 / 16  # one of four columns has nothing beside it
    for layer in (0, 2):  # windows are whole
        assert set(found.labels[layer]) == {label}
        assert found.scores[layer] == pytest.approx([(3 / 4 - chance) / (1 - chance)] * (2 + layer), abs=1e-4)
    for layer in (1, 3):  # shifted
        assert set(found.labels[layer]) == {label}


def test_memory_of_the_rules_is_of_offsets_and_not_of_pairs():
    model = ours()
    stream = Stream(model)
    stream.add(pictures((32, 48)))
    assert {tuple(mass.shape) for mass in stream.offsets.values()} == {(2, 7, 5)}
    assert math.prod((7, 5)) < 12 * 12

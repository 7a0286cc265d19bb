"""The labels of heads: planted heads found by name, scores by hand, and no label on most heads of real models."""

import math
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vitlens
from tests.analysis.heads.planted import Bench, planted, scenes
from tests.analysis.made import made_model, numbered, uniform
from tests.lens.tiny import images as pictures
from tests.lens.tiny import ours, timm_model, torchvision_swin
from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.registry import LABELS, MIXED, UNLABELLED, head_words
from vitlens.analysis.heads.specialisation import (
    OFFSETS,
    RULES,
    Specialisation,
    half_width,
    label_of,
    offset_bits,
    specialise,
)
from vitlens.analysis.heads.statistics import GROUPS, Statistics, Stream, statistics
from vitlens.data.split import Split
from vitlens.models.model import Model

IMAGES = 12
GRIDS = [(6, 6), (5, 8), (8, 8)]
LAYOUTS = [((8, 8), 0), ((8, 8), 1), ((6, 10), 0), ((6, 10), 5), ((10, 6), 1)]


def found_in(seed: int, grid: tuple[int, int], *, order: Tensor | None = None) -> dict[str, str]:
    """The label that every planted head got, by its name; order: in which the heads stand in the model."""
    forms, made = Bench(grid, seed).heads(), scenes(grid, 24, seed)
    names = list(forms) if order is None else [list(forms)[place] for place in order]
    dead = (names.index("dead"),)
    model = planted([forms[name] for name in names], grid, dead=dead, seed=seed)
    found = specialise(statistics(model, made.images, masks=made.masks))
    return dict(zip(names, found.labels[0], strict=True))


def as_planted(found: dict[str, str]) -> dict[str, str]:
    """The labels that they should have got; of noise any that says that there is no pattern."""
    noise = {name: label if label in (MIXED, UNLABELLED) else UNLABELLED for name, label in found.items()}
    return {name: noise[name] if name.startswith("noise") else name for name in found}


@pytest.mark.parametrize("seed", range(3))
def test_each_planted_head_is_found_with_its_name_and_no_other(seed):
    found = found_in(seed, GRIDS[seed])
    assert found == as_planted(found)
    assert set(found.values()) >= set(RULES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 23))
def test_each_planted_head_is_found_over_twenty_seeds(seed):
    found = found_in(seed, GRIDS[seed % 3])
    assert found == as_planted(found)


def test_without_masks_no_head_is_said_to_attend_to_the_object():
    forms, made = Bench((6, 6), 0).heads(), scenes((6, 6), 24, 0)
    model = planted([forms["object"], forms["background"], forms["sink"]], (6, 6))
    found = specialise(statistics(model, made.images))
    assert found.all_scores["object"].abs().max() == 0
    assert found.all_scores["background"].abs().max() == 0
    assert found.labels[0][2] == "sink"
    assert not {"object", "background"} & set(found.labels[0])


def counts(table: Statistics) -> Counter[str]:
    found = specialise(table)
    return Counter(label for layer in found.labels for label in layer)


def of_split(model: Model, split: Split) -> Counter[str]:
    stream = Stream(model)
    for batch in split.batches(24):
        stream.add(batch.images, masks=None if split.masks is None else split.masks[batch.indices])
    return counts(stream.result())


def test_no_label_covers_more_than_half_of_the_bundled_model():
    found = of_split(vitlens.load("vit-digits"), vitlens.load_data("digits", limit=48))
    assert sum(found.values()) == 24
    assert max(found.values()) <= 12, found


@pytest.mark.slow
@pytest.mark.skipif("VITLENS_DATA" not in os.environ, reason="needs the weights of DeiT-tiny and photographs")
def test_no_label_covers_more_than_half_of_deit_tiny():
    data = Path(os.environ["VITLENS_DATA"])
    weights = data / "weights" / "deit_tiny_patch16_224.safetensors"
    model = vitlens.load("timm:deit_tiny_patch16_224", weights=str(weights))
    split = vitlens.load_data(str(data / "photos"), limit=48, preprocessing=model.preprocessing, whole=True)
    found = of_split(model, split)
    assert sum(found.values()) == 36
    assert max(found.values()) <= 18, found
    assert found["sink"] >= 3  # the last layer


def test_the_documentation_defines_every_label():
    text = (Path(__file__).parents[3] / "docs" / "stats.md").read_text()
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    defined = {name.strip() for cell in first for name in cell.split(",")}
    assert set(RULES) <= defined
    assert {f"`{MIXED}`", f"`{UNLABELLED}`"} <= set(text.replace(":", " ").split())


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

    def row(self) -> Tensor:
        """All on the query's row."""
        return self.head((self.down[:, None] == self.down).float())

    def beside(self) -> Tensor:
        """All on the right neighbour; on itself where there is none."""
        step = torch.where(self.across + 1 < self.grid[1], 1, 0)
        return self.head(torch.eye(self.patches)[torch.arange(self.patches) + step])

    def on(self, keys: tuple[int, ...]) -> Tensor:
        """All patches' attention on these tokens."""
        weights = uniform(self.images, 1, self.tokens)[:, 0].clone()
        weights[:, self.prefix :] = 0
        weights[:, self.prefix :, list(keys)] = 1 / len(keys)
        return weights

    def random_keys(self) -> Tensor:
        """Another key for every query of every image."""
        keys = torch.randint(self.patches, (self.images, self.patches), generator=self.generator)
        return self.head(torch.eye(self.patches)[keys])

    def own_key(self) -> Tensor:
        """One key for all queries of an image, another in each image."""
        keys = torch.randperm(self.patches, generator=self.generator)[: self.images]
        return self.head(torch.eye(self.patches)[keys][:, None].expand(-1, self.patches, -1))


def streamed(heads: list[Tensor], grid: tuple[int, int], prefix: int) -> Statistics:
    model = made_model(torch.stack(heads, 1), grid=grid, prefix=prefix)
    return statistics(model, numbered(model, len(heads[0])), batch_size=5)


def score(found: Specialisation, rule: str, head: int = 0) -> float:
    return found.all_scores[rule][0, head].item()


@pytest.mark.parametrize(("grid", "prefix"), LAYOUTS)
def test_made_attention_gets_its_label_on_any_layout(grid, prefix):
    made = Maker(grid, prefix)
    kinds = {
        "self": made.head(torch.eye(made.patches)),
        "same row": made.row(),
        "uniform": uniform(IMAGES, 1, made.tokens)[:, 0],
        "position": made.on((prefix + 4,)),
        "sink": made.own_key(),
        UNLABELLED: made.random_keys(),
        **({"CLS": made.on((0,))} if prefix else {}),
        **({"register": made.on((2,))} if prefix > 1 else {}),
    }
    found = specialise(streamed(list(kinds.values()), grid, prefix))
    assert list(found.labels[0]) == list(kinds)
    for head, name in enumerate(kinds):
        if name in RULES:
            assert score(found, name, head) > 0.9, name
            assert found.given[0][head].score == score(found, name, head)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_scores_by_hand(share):
    """A share of the attention on the row, the rest even over all keys: two weights, both of the pattern."""
    made, (rows, columns) = Maker((6, 10), 0), (6, 10)
    weights = share * made.row() + (1 - share) * made.head(torch.ones(60, 60))
    found = specialise(streamed([weights], (6, 10), 0))
    inside, outside = share / columns + (1 - share) / 60, (1 - share) / 60
    bits = math.log2(60) + columns * inside * math.log2(inside) + (60 - columns) * outside * math.log2(outside)
    assert score(found, "same row") == pytest.approx(bits / max(1, bits), abs=1e-4)
    assert score(found, "uniform") == pytest.approx(max(0, 1 - bits), abs=1e-4)
    assert rows * columns == 60
    on_itself = specialise(streamed([made.head(torch.eye(60))], (6, 10), 0))
    assert score(on_itself, "same row") == pytest.approx(math.log2(6) / math.log2(60), abs=1e-4)


@pytest.mark.parametrize("name", ["previous", "same row", "left", "within 5"])
def test_offset_bits_are_the_greatest_gain_in_likelihood(name):
    """Against a search over strengths, from all pairs."""
    place, (rows, columns) = Geometry((4, 5), (1.0, 1.0)), (4, 5)
    weights = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)).double().pow(3)
    weights /= weights.sum(-1, keepdim=True)
    index = torch.arange(20)
    down, across = index // columns - (index // columns)[:, None], index % columns - (index % columns)[:, None]
    inside = OFFSETS[name](down, across)
    weights = (weights + 3 * inside) / (weights + 3 * inside).sum(-1, keepdim=True)
    gains = [
        float((weights * ((inside * strength).softmax(-1) * 20).log2()).sum(-1).mean())
        for strength in torch.linspace(0, 12, 4001).double()
    ]
    mass = place.by_offset(weights) / (rows * columns)
    assert float(offset_bits(mass, place, name)) == pytest.approx(max(gains), abs=1e-5)


def test_position_is_predicted_from_other_images():
    """As many random places as images: their mean has peaks at each, which say nothing about another image."""
    made = Maker((8, 8), 1, images=GROUPS)
    found = specialise(streamed([made.own_key(), made.on((7,))], (8, 8), 1))
    assert score(found, "position", 0) == 0
    assert score(found, "sink", 0) > 0.9
    assert score(found, "position", 1) > 0.9
    assert score(found, "sink", 1) < 0.1


def test_one_image_cannot_tell_a_place_from_a_sink():
    found = specialise(streamed([Maker((8, 8), 1, images=1).on((7,))], (8, 8), 1))
    (only,) = found.given[0]
    assert only.label == MIXED
    assert {only.best, only.other} == {"position", "sink"}
    assert math.isnan(only.low)
    assert math.isnan(only.high)


def test_images_in_any_batches_and_processes_give_the_same_labels():
    model, batch = ours(registers=1), pictures((32, 48), batch=21)
    whole, parts = Stream(model), [Stream(model) for _ in range(2)]
    whole.add(batch)
    for rank, part in enumerate(parts):
        numbers = torch.arange(rank, 21, 2)
        part.add(batch[numbers][:3], numbers=numbers[:3])
        part.add(batch[numbers][3:], numbers=numbers[3:])
    parts[0].evidence.add(parts[1].evidence)
    torch.testing.assert_close(parts[0].evidence.counts, whole.evidence.counts)
    for key, value in whole.evidence.sums.items():
        torch.testing.assert_close(parts[0].evidence.sums[key], value, atol=1e-5, rtol=1e-5, msg=str(key))


def scores(**given: float) -> dict[str, Tensor]:
    """Scores of all labels with a little spread over 16 groups of images."""
    noise = 1e-4 * torch.randn(17, generator=torch.Generator().manual_seed(0)).double()
    return {name: given.get(name.replace(" ", "_"), 0.05) + noise for name in RULES}


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ({"position": 0.7}, "position"),
        ({"position": 0.49}, UNLABELLED),
        ({"position": 0.4, "sink": 0.15}, MIXED),  # 0.55 together
        ({"position": 0.45, "sink": 0.08}, UNLABELLED),  # the second is next to nothing
        ({"position": 0.6, "sink": 0.55}, MIXED),
        ({"previous": 0.6, "local": 0.58}, "previous"),  # one is a case of the other
        ({"dead": 1.0, "position": 1.0}, "dead"),
        ({"dead": 0.4, "position": 0.9}, "position"),
    ],
)
def test_a_label_is_given_where_it_explains_most_and_clearly_more_than_its_rivals(given, label):
    assert label_of(scores(**given)).label == label


def test_a_margin_within_its_interval_is_not_clear():
    wide = scores(position=0.75)
    wide["position"] = wide["position"] + 0.1 * torch.randn(17, generator=torch.Generator().manual_seed(1))
    wide["position"][0] = 0.75
    given = label_of({**wide, "sink": torch.full((17,), 0.5, dtype=torch.float64)})
    assert given.high - given.low > 0.3
    assert given.label == MIXED


def test_the_jackknife_of_a_mean_is_students_interval():
    values = torch.randn(16, generator=torch.Generator().manual_seed(0)).double()
    left = torch.stack([torch.cat((values[:at], values[at + 1 :])).mean() for at in range(16)])
    expected = 2.131449545559323 * float(values.std()) / 4  # Student's t with 15 degrees of freedom
    assert half_width(torch.cat((values.mean()[None], left))) == pytest.approx(expected)


def test_labels_that_contain_one_another_do_not_compete():
    assert label_of(scores(previous=0.9, local=0.6)).other not in ("previous", "local")
    assert label_of(scores(local=0.9, previous=0.6)).other not in ("previous", "local")
    assert label_of(scores(previous=0.9, next=0.6)).other == "next"
    assert {name for label in LABELS.values() for name in label.within} <= RULES.keys()


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


@pytest.mark.parametrize(
    ("name", "grid", "prefix"), [("row", (4, 6), 0), ("random_keys", (6, 4), 1), ("own_key", (5, 5), 5)]
)
def test_what_offsets_explain_is_the_share_of_variance(name, grid, prefix):
    weights = getattr(Maker(grid, prefix, images=4), name)()
    found = specialise(streamed([weights], grid, prefix))
    expected = explained_by_hand(weights[:, prefix:, prefix:], grid)
    assert found.explained[0, 0].item() == pytest.approx(expected, abs=1e-4)


def test_ratios_by_hand():
    """Mean weight at an offset over that of uniform attention; self attention: patches times as much on itself."""
    made = Maker((3, 4), 0)
    found = specialise(streamed([made.head(torch.eye(12)), made.beside()], (3, 4), 0))
    itself, beside = found.ratios[0]
    assert itself.shape == (5, 7)
    assert itself[2, 3].item() == pytest.approx(12)
    assert itself.sum().item() == pytest.approx(12)
    assert beside[2, 4].item() == pytest.approx(12)  # each pair that is side by side has all of its row
    assert beside[2, 3].item() == pytest.approx(12 * 1 / 4)  # a quarter of the patches has none beside


@pytest.mark.parametrize(("grid", "prefix"), [((1, 7), 0), ((7, 1), 1), ((1, 1), 0), ((1, 1), 5), ((2, 1), 5)])
def test_grids_of_one_row_column_or_patch(grid, prefix):
    made = Maker(grid, prefix)
    heads = [
        uniform(IMAGES, 1, made.tokens)[:, 0],
        made.head(torch.eye(made.patches)),
        made.beside(),
        made.random_keys(),
    ]
    found = specialise(streamed(heads, grid, prefix))
    assert set(found.labels[0]) <= set(LABELS)
    for rule in RULES:
        assert torch.isfinite(found.all_scores[rule]).all(), rule
    assert found.labels[0][0] == "uniform"
    if made.patches > 2:
        assert found.labels[0][1] == "self"
        assert found.labels[0][2] == ("next" if grid[1] > 1 else "self")
    if grid[0] == 1 and not prefix:  # all keys are in one row
        assert found.all_scores["same row"][0].abs().max() < 1e-5


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
        assert set(found.labels[layer]) <= {"uniform", "dead"}  # ours are without values, too
        assert found.all_scores["uniform"][layer, : site.heads].min() > 1 - 1e-4
        uniform_distance = table.uniform_distance()[layer].expand(site.heads)
        torch.testing.assert_close(table.distance[layer, : site.heads], uniform_distance, atol=0, rtol=1e-5)
        for rule in set(RULES) - {"uniform", "dead"}:
            assert found.all_scores[rule][layer, : site.heads].abs().max() < 1e-5, rule
        ratios = found.ratios[layer]
        torch.testing.assert_close(ratios, torch.ones_like(ratios), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("across", "label"), [(-1, "previous"), (1, "next")])
def test_windows_of_swin_that_all_look_aside(across, label):
    """Made by the bias that Swin adds at each offset of a window."""
    model = flattened(timm_model("swin_tiny_patch4_window7_224"))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if name.endswith("relative_position_bias_table"):
                parameter.view(7, 7, -1)[3, 3 - across] = 40  # timm counts query minus key
    found = specialise(statistics(model, pictures()))
    for layer in range(4):  # whole windows, and shifted ones
        assert set(found.labels[layer]) == {label}
        assert min(one.score for one in found.given[layer]) > 0.9


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("self", "self", None, 0.9), "self: a patch attends to itself"),
        ((MIXED, "sink", "position", 0.5), "mixed: sink and position"),
        ((UNLABELLED, "sink", None, 0.2), "no clear pattern, partly sink"),
        ((UNLABELLED, "sink", None, 0.19), "no clear pattern"),
    ],
)
def test_a_head_in_words(given, words):
    assert head_words(*given) == words

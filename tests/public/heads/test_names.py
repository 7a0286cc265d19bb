"""`vitlens.name_heads` on heads made by hand, with known attention and known outputs."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind
from sklearn.metrics import roc_auc_score

import vitlens
from tests.kit.families import FAMILIES as MANY
from tests.kit.marks import slow_except
from tests.kit.planted_patterns import STRONG, Bench, planted, scenes
from tests.kit.planted_writers import model as writers
from tests.kit.planted_writers import pictures
from tests.kit.select import select, values_of
from tests.kit.splits import split_of
from tests.kit.tiny import FAMILIES, images, model_of, ours, small_cnn
from vitlens.errors import InputError, UnsupportedError

GRID = (4, 5)
COUNT = 24
SEEDS = slow_except(range(20), (0, 1))
ATTENDS = {
    "position": "same keys",
    "object": "same keys",
    "next": "position to position",
    "similar": "content to content",
    "asks by content": "content to position",
    "asks by position": "position to content",
    "uniform": "uniform",
}


def forms(bench: Bench) -> list[torch.Tensor]:
    """Return the heads of ATTENDS.

    Before the last two come one that asks by the red of a patch for one of two places, and one
    that asks by the half of the image for red or for green.
    """
    available = bench.heads()
    patches = slice(2, bench.tokens)
    left = torch.where(
        torch.arange(bench.patches) % bench.grid[1] < bench.grid[1] // 2, STRONG, -STRONG
    )
    available["asks by content"] = bench.form([bench.tokens], [3], STRONG) + bench.form(
        [bench.tokens], [9], -STRONG
    )
    available["asks by position"] = bench.form(patches, bench.tokens, left)
    return [available[name] for name in ATTENDS]


@pytest.mark.parametrize("seed", SEEDS)
def test_by_what_planted_heads_attend_and_what_they_look_at_is_named_and_stands_the_test(seed):
    drawn = scenes(GRID, COUNT, seed)
    named_heads = vitlens.name_heads(
        planted(forms(Bench(GRID, seed)), GRID, seed=seed), drawn.images, masks=drawn.masks
    )
    assert {name: head.attends.word for name, head in zip(ATTENDS, named_heads.heads)} == ATTENDS
    assert values_of(named_heads.heads, "holds") == [True] * 6 + [None]
    words = dict(zip(ATTENDS, (head.words for head in named_heads.heads)))
    assert words["next"] == "attends by position to position (tested); looks at: next (tested)"
    assert words["object"].startswith("attends to the same keys for every query (tested)")
    assert words["uniform"] == "attends evenly"
    first = named_heads.heads[0]
    failed = replace(first, attends=replace(first.attends, holds=False)).words
    assert failed.startswith("attends to the same keys for every query (fails its test); ")
    by = {name: head.attends.shares for name, head in zip(ATTENDS, named_heads.heads)}
    assert by["position"]["same keys by position"] > 0.9
    assert by["object"]["same keys by content"] > 0.5
    for head in named_heads.heads[:-1]:  # the last has no logits
        assert sum(head.attends.shares.values()) == pytest.approx(1, abs=1e-6)
    looks = {name: head.looks for name, head in zip(ATTENDS, named_heads.heads)}
    for name in ("position", "object", "next", "similar"):
        assert (looks[name].word, looks[name].holds) == (name, True)
    # no pattern that could move
    assert (looks["uniform"].word, looks["uniform"].holds) == (
        "uniform",
        None,
    )


def test_a_dead_head_has_no_pattern_that_is_tested():
    drawn = scenes(GRID, COUNT, 0)
    bench = Bench(GRID, 0).heads()
    model = planted([bench["next"], bench["same column"]], GRID, dead=(1,))
    alive, dead = vitlens.name_heads(model, drawn.images, masks=drawn.masks).heads
    assert (alive.looks.word, alive.looks.holds) == ("next", True)
    assert (dead.looks.word, dead.looks.holds, dead.looks.moved) == ("dead", None, None)


@pytest.mark.slow  # looking through all objects takes long
def test_queries_and_keys_of_all_images_are_not_kept():
    """Memory alive at the last image grows by little more than the pixels of the images."""
    alive: dict[int, int] = {}
    for count in (16, 64):
        model = ours()
        pixels = images((32, 48), batch=count)

        last = model.prepare(pixels[-1:])[0]

        def note(
            _: object,
            args: tuple[torch.Tensor, ...],
            count: int = count,
            last: torch.Tensor = last,
        ) -> None:
            if torch.equal(args[0][-1], last):
                tensors = (tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor)
                storages = {
                    tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                    for tensor in tensors
                }
                alive[count] = max(alive.get(count, 0), sum(storages.values()))

        handle = model.module.register_forward_pre_hook(note)
        vitlens.name_heads(model, pixels, batch_size=8)
        handle.remove()
    assert alive[64] - alive[16] < 2 * 48 * pixels[0].nbytes


def test_images_of_another_size_are_shuffled_by_the_patches_of_the_model():
    drawn = scenes(GRID, COUNT, 0)
    model = planted(forms(Bench(GRID, 0)), GRID)
    large = [
        pixels_of.repeat_interleave(2, -1).repeat_interleave(2, -2)
        for pixels_of in (drawn.images, drawn.masks)
    ]
    named_heads = vitlens.name_heads(model, large[0], masks=large[1])
    assert {name: head.attends.word for name, head in zip(ATTENDS, named_heads.heads)} == ATTENDS
    assert values_of(named_heads.heads, "holds") == [True] * 6 + [None]
    assert values_of(named_heads.heads[:3], "looks.holds") == [True] * 3


def test_every_head_is_there_though_it_may_have_no_word():
    side, make = MANY["mobilevit"]
    named_heads = vitlens.name_heads(
        model_of(make(), size=(side, side)), images((side, side), batch=8)
    )
    assert set(values_of(named_heads.heads, "layer")) == set(range(9))
    assert set(values_of(named_heads.heads, "attends", "looks", "writes")) == {(None, None, None)}


# the second adds a bias for every pair of positions
@pytest.mark.parametrize("family", ["ours", "beit"])
def test_shares_are_those_of_the_logits_that_the_model_computes(family):
    """The same keys whoever asks: the variance of the mean row."""
    model = FAMILIES[family]()
    batch = images(model.input_size, batch=12)
    named_heads = vitlens.name_heads(model, batch)
    prefix = len(model.layout.prefix)
    scores = vitlens.capture(model, batch, "blocks.1.attention.scores")[
        "blocks.1.attention.scores"
    ].double()
    logits = scores[..., prefix:, prefix:]
    logits = logits - logits.mean(-1, keepdim=True)
    for head in select(named_heads.heads, layer=1):
        head_logits = logits[:, head.head]
        mean = head_logits.mean(1, keepdim=True).expand_as(head_logits)
        shares = head.attends.shares
        same = shares["same keys by position"] + shares["same keys by content"]
        assert same == pytest.approx(
            float(mean.square().sum() / head_logits.square().sum()), rel=1e-4
        )
        assert head.attends.spread == pytest.approx(
            float(head_logits.square().mean().sqrt()), rel=1e-4
        )


# the fourth hardly matters, the fifth is dead, the last adds the same to all classes
GAINS = [(0, 40.0), (1, 40.0), (2, 40.0), (0, 0.2), (1, 0.0), (3, 40.0)]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_planted_heads_write_is_named_and_only_what_matters_is_said_to(seed):
    model, (pixels, labels) = writers(GAINS), pictures(60, seed)
    heads = vitlens.name_heads(model, pixels, labels).heads
    assert values_of(heads, "writes.word", "writes.state") == [
        ("red", "shown to matter"),
        ("green", "shown to matter"),
        ("blue", "shown to matter"),
        ("red", "correlates"),
        (None, "nothing"),
        (None, "nothing"),
    ]
    labels_of_heads = [head.words.split("; ")[-1] for head in heads]
    assert labels_of_heads == [
        "writes red (tested)",
        "writes green (tested)",
        "writes blue (tested)",
        "correlates with red",
        "tells no class",
        "tells no class",
    ]
    for head, name in zip(heads[:3], ("red", "green", "blue")):
        assert head.writes.margin.value > 0.1
        assert head.writes.p < 0.05
        of_class = vitlens.direct_logit_attribution(model, pixels, name).heads[:, 0, head.head]
        for_all_classes = [
            vitlens.direct_logit_attribution(model, pixels, class_name).heads[:, 0, head.head]
            for class_name in model.classes
        ]
        expected = roc_auc_score(
            labels == model.classes.index(name), of_class - torch.stack(for_all_classes).mean(0)
        )
        assert head.writes.auc.value == pytest.approx(expected)
        assert head.writes.auc.low <= expected <= head.writes.auc.high


def test_the_p_of_what_a_head_writes_is_welchs_one_sided_one_corrected_for_the_heads_with_a_word():
    """All images are said to be red: without the heads of green and blue, images of these lose less
    than the others.
    """
    model, (pixels, colours) = (
        writers([(0, 40.0), (1, 40.0), (2, 40.0), (0, 0.02)]),
        pictures(60, 0),
    )
    attributes = {name: colours == at for at, name in enumerate(model.classes[:3])}
    heads = vitlens.name_heads(
        model, pixels, torch.zeros_like(colours), attributes=attributes
    ).heads
    words = values_of(heads, "writes")
    assert values_of(words, "word") == ["red", "green", "blue", "red"]
    plain = []
    for written in words:
        held = attributes[written.word]
        test = ttest_ind(
            written.falls[held], written.falls[~held], equal_var=False, alternative="greater"
        )
        plain.append(test.pvalue)
    assert max(plain) > 0.5
    ranked = sorted(range(len(plain)), key=lambda at: plain[at])
    corrected = np.maximum.accumulate(
        [(len(plain) - rank) * plain[at] for rank, at in enumerate(ranked)]
    ).clip(0, 1)
    assert [words[at].p for at in ranked] == pytest.approx(list(corrected))


def test_copies_of_an_image_in_one_source_make_no_word_more_certain():
    model, (pixels, labels) = writers([(0, 0.4), (1, 0.2), (2, 0.02), (0, 0.01)]), pictures(60, 0)
    once = split_of(pixels, labels, model.classes)
    twice = torch.arange(60).repeat_interleave(2)
    copies = split_of(once.source.pixels[twice], labels[twice], model.classes, groups=twice)
    plain = vitlens.name_heads(model, once).heads
    grouped = vitlens.name_heads(model, copies).heads
    for head, other in zip(plain, grouped, strict=True):
        one = head.writes
        two = other.writes
        assert (two.word, two.state, two.alike) == (one.word, one.state, one.alike)
        for first, second in ((one.auc, two.auc), (one.margin, two.margin)):
            expected = pytest.approx((first.value, first.low, first.high), rel=1e-5)
            assert (second.value, second.low, second.high) == expected
        assert two.p == pytest.approx(one.p, rel=1e-4)


def false_words(seed: int, copies: int) -> int:
    """Count the words that four heads get for labels at random.

    copies: how many images of each of 30 sources are alike.
    """
    draw = torch.Generator().manual_seed(seed)
    groups = torch.arange(30).repeat_interleave(copies)
    colours = torch.rand(30, 3, 1, 1, generator=draw)[groups] + 0.1 * torch.rand(
        len(groups), 3, 1, 1, generator=draw
    )
    labels = (torch.randperm(30, generator=draw) % 3)[groups]
    model = writers([(0, 4.0), (1, 4.0), (2, 4.0), (1, 0.4)])
    split = split_of((colours / 1.1).expand(-1, -1, 16, 16), labels, model.classes, groups=groups)
    return sum(head.writes.state != "nothing" for head in vitlens.name_heads(model, split).heads)


@pytest.mark.parametrize(
    ("copies", "runs"),
    [
        (4, 10),
        pytest.param(2, 200, marks=pytest.mark.slow),
        pytest.param(4, 200, marks=pytest.mark.slow),
    ],
)
def test_images_of_one_source_are_no_evidence_for_a_word(copies, runs):
    wrong = sum(false_words(seed, copies) > 0 for seed in range(runs))
    assert wrong <= 0.05 * runs


def several_classes(gains: list[list[tuple[int, float]]]) -> vitlens.Model:
    """Build a head for each list of (channel, gain), which adds these mean colours to its class."""
    model = writers([(0, 0.0) for _ in gains])
    attention = model.module.blocks[0].attn
    classifier = model.module.head
    width = attention.proj.weight.shape[0] // len(gains)
    values = attention.qkv.weight.data.view(3, len(gains), width, -1)[2]
    for head, added in enumerate(gains):
        for channel, gain in added:
            values[head, channel, channel] = 1
            classifier.weight.data[channel, head * width + channel] = gain
    return model


def test_a_head_that_writes_all_classes_alike_writes_no_single_one():
    every = [(0, 40.0), (1, 40.0), (2, 40.0)]
    model, (pixels, labels) = several_classes([[(0, 40.0)], every]), pictures(90, 0)
    one, all_three = (head.writes for head in vitlens.name_heads(model, pixels, labels).heads)
    assert (one.word, one.state, one.alike) == ("red", "shown to matter", ("red",))
    assert (all_three.word, all_three.state, all_three.margin) == (None, "several", None)
    assert {*all_three.alike} == {"red", "green", "blue"}


def test_of_two_classes_a_head_writes_the_one_that_it_pushes_up():
    """Their AUCs are equal, as what one class gains the other loses."""
    three_classes = writers([(0, 40.0), (1, 40.0), (1, 0.0)])
    classifier = torch.nn.Linear(three_classes.module.head.in_features, 2)
    classifier.weight.data = three_classes.module.head.weight.data[:2].clone()
    classifier.bias.data = three_classes.module.head.bias.data[:2].clone()
    three_classes.module.head = classifier
    model = model_of(three_classes.module, size=three_classes.input_size, classes=("red", "green"))
    pixels, colours = pictures(90, 0)
    chosen = colours < 2
    heads = vitlens.name_heads(model, pixels[chosen], colours[chosen]).heads
    assert values_of(heads, "writes.word") == ["red", "green", None]
    assert values_of(heads, "writes.alike") == [("red",), ("green",), ()]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_word_names_up_to_three_attributes_of_which_none_is_clearly_best(count):
    """The first attribute is that of red images, each other one is so but for one image."""
    model, (pixels, colours) = writers([(0, 40.0)]), pictures(90, 0)
    attributes = dict.fromkeys("abcd"[:count], colours == 0)
    for at, name in enumerate("bcd"[: count - 1], 1):
        attributes[name] = attributes[name].clone()
        attributes[name][at] = True  # a green or a blue image
    (head,) = vitlens.name_heads(
        model, pixels, torch.zeros_like(colours), attributes=attributes
    ).heads
    assert {*head.writes.alike} == {*attributes}
    if count > 3:
        assert (head.writes.word, head.writes.state, head.writes.p) == (None, "several", None)
    else:
        assert head.writes.word.startswith("a")
        for name in "bcd"[: count - 1]:
            assert f" {name}" in head.writes.word
        assert head.writes.state == "shown to matter"


def test_what_a_certain_model_loses_without_a_head_is_not_lost_to_rounding():
    """Log-odds are above 30, where single precision has none."""
    model, (pixels, labels) = writers([(0, 400.0), (1, 400.0), (2, 400.0)]), pictures(60, 0)
    heads = vitlens.name_heads(model, pixels, labels).heads
    for head in heads:
        place = f"blocks.0.head.{head.head}"
        mean = vitlens.capture(model, pixels, place)[place].mean(0)
        with torch.no_grad(), vitlens.intervene(model, {place: mean}):
            without = model(pixels)
        odds = []
        for logits in (model(pixels), without):
            label = torch.nn.functional.one_hot(labels, logits.shape[1]).bool()
            odds.append(
                logits.double()[label] - logits.double().masked_fill(label, -torch.inf).logsumexp(1)
            )
        assert odds[0].min() > 30
        assert head.writes.falls == pytest.approx((odds[0] - odds[1]).detach(), rel=1e-3, abs=1e-2)
        assert head.writes.state == "shown to matter"


def test_one_class_of_enough_images_is_tested_though_all_others_are_rare():
    model, (pixels, labels) = writers(GAINS), pictures(150, 0)
    chosen = torch.cat([(labels == at).nonzero()[:count, 0] for at, count in enumerate((46, 4, 4))])
    red, *_ = vitlens.name_heads(model, pixels[chosen], labels[chosen]).heads
    assert red.writes.word == "red"
    assert red.writes.auc.value > 0.95


def test_a_rare_attribute_takes_no_word_away():
    """Seven images have one, all of them at even places; four have the other, which is too rare."""
    model, (pixels, labels) = writers(GAINS), pictures(60, 0)
    attributes = {name: torch.zeros(60, dtype=torch.bool) for name in ("uneven", "too rare")}
    attributes["uneven"][:14:2] = True
    attributes["too rare"][:4] = True
    named_heads = vitlens.name_heads(model, pixels, labels, attributes=attributes)
    plain = vitlens.name_heads(model, pixels, labels)
    assert values_of(named_heads.heads, "writes.word") == values_of(plain.heads, "writes.word")
    assert values_of(named_heads.heads, "writes.state") == values_of(plain.heads, "writes.state")
    (note,) = named_heads.notes
    assert "too rare" in note
    assert "uneven" not in note


def test_nothing_is_invented_where_labels_are_permuted():
    """Of twenty permutations at most one names a class or an attribute for any head."""
    model, (pixels, labels) = writers(GAINS), pictures(60, 0)
    count = 0
    for seed in range(20):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
        named_heads = vitlens.name_heads(
            model, pixels, labels[order], attributes={"first": labels[order] == 0}, seed=seed
        )
        count += any(head.writes.word for head in named_heads.heads)
    assert count <= 1


def test_an_attribute_of_the_images_is_written_as_a_class_is():
    model, (pixels, labels) = writers(GAINS), pictures(60, 0)
    held = labels != 1
    (head, *_) = vitlens.name_heads(
        model, pixels, torch.zeros_like(labels), attributes={"not green": held}
    ).heads[1:]
    assert head.writes.word == "not green"
    assert head.writes.auc.value > 0.95


def test_predictions_stand_for_labels_and_heads_of_windows_write_nothing_that_is_known():
    model, (pixels, _) = writers(GAINS), pictures(60, 0)
    with torch.no_grad():
        predicted = model(pixels).argmax(-1)
    heads = vitlens.name_heads(model, pixels, "predicted").heads
    same = vitlens.name_heads(model, pixels, predicted).heads
    assert values_of(heads, "writes.auc") == values_of(same, "writes.auc")
    windowed = FAMILIES["torchvision-swin"]()
    batch = images(windowed.input_size, batch=50)
    in_windows = vitlens.name_heads(
        windowed, batch, torch.zeros(50).long(), attributes={"odd": torch.arange(50) % 2 == 1}
    )
    assert "what heads write" in in_windows.notes[-1]
    for head in in_windows.heads:
        assert head.writes is None


def test_words_that_need_nothing_else_are_given_and_the_others_are_told_why_not():
    model = ours()
    batch = images((32, 48), batch=9)
    named_heads = vitlens.name_heads(model, batch)
    for head in named_heads.heads:
        assert head.writes is None
        assert head.attends is not None
    for labels, said in ((None, "labels"), (torch.arange(9) % 3, "50 images")):
        (note,) = vitlens.name_heads(model, batch, labels).notes
        assert said in note
    few = vitlens.name_heads(model, batch[:2])
    assert values_of(few.heads, "attends") == [None] * len(few.heads)
    for head in few.heads:
        assert head.looks is not None
    with pytest.raises(InputError, match="masks"):
        vitlens.name_heads(model, batch, masks=torch.ones(3, 32, 48, dtype=torch.bool))
    with pytest.raises(UnsupportedError):
        vitlens.name_heads(small_cnn((16, 24)), images((16, 24)))


def test_masks_are_counted_next_to_an_attribute_of_that_name():
    masks = torch.ones(3, 32, 48, dtype=torch.bool)
    attributes = {"masks": torch.arange(9) % 2 == 0}
    with pytest.raises(InputError):
        vitlens.name_heads(ours(), images((32, 48), batch=9), attributes=attributes, masks=masks)

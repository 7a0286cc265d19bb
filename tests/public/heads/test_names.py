"""`vitlens.name_heads` on heads made by hand, of which it is known by what they attend, what they look at and write."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind
from sklearn.metrics import roc_auc_score

import vitlens
from tests.kit.families import FAMILIES as MANY
from tests.kit.planted_patterns import STRONG, Bench, planted, scenes
from tests.kit.planted_writers import model as writers
from tests.kit.planted_writers import pictures
from tests.kit.tiny import FAMILIES, images, model_of, ours, small_cnn
from vitlens.errors import InputError, UnsupportedError

GRID, COUNT = (4, 5), 24
SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed > 1 else ()) for seed in range(20)]
ATTENDS = {
    "position": "same keys", "object": "same keys", "next": "position to position", "similar": "content to content",
    "asks by content": "content to position", "asks by position": "position to content", "uniform": "uniform",
}  # fmt: skip


def forms(bench: Bench) -> list[torch.Tensor]:
    """The heads of ATTENDS; the last but two ask by the red of a patch for one of two places, and by the half of the
    image that a patch is in for red or for green."""
    known, patches = bench.heads(), slice(2, bench.tokens)
    left = torch.where(torch.arange(bench.patches) % bench.grid[1] < bench.grid[1] // 2, STRONG, -STRONG)
    known["asks by content"] = bench.form([bench.tokens], [3], STRONG) + bench.form([bench.tokens], [9], -STRONG)
    known["asks by position"] = bench.form(patches, bench.tokens, left)
    return [known[name] for name in ATTENDS]


@pytest.mark.parametrize("seed", SEEDS)
def test_by_what_planted_heads_attend_and_what_they_look_at_is_named_and_stands_the_test(seed):
    drawn = scenes(GRID, COUNT, seed)
    found = vitlens.name_heads(planted(forms(Bench(GRID, seed)), GRID, seed=seed), drawn.images, masks=drawn.masks)
    assert {name: head.attends.word for name, head in zip(ATTENDS, found.heads)} == ATTENDS
    assert [head.holds for head in found.heads] == [True] * 6 + [None]
    told = dict(zip(ATTENDS, (head.words for head in found.heads)))
    assert told["next"] == "attends by position to position (tested); looks at: next (tested)"
    assert told["object"].startswith("attends to the same keys whichever patch asks (tested)")
    assert told["uniform"] == "attends evenly"
    failed = replace(found.heads[0], holds=False).words
    assert failed.startswith("attends to the same keys whichever patch asks (fails its test); ")
    by = {name: head.attends.shares for name, head in zip(ATTENDS, found.heads)}
    assert by["position"]["same keys by position"] > 0.9
    assert by["object"]["same keys by content"] > 0.5
    for head in found.heads[:-1]:  # the last has no logits
        assert sum(head.attends.shares.values()) == pytest.approx(1, abs=1e-6)
    looks = {name: head.looks for name, head in zip(ATTENDS, found.heads)}
    for name in ("position", "object", "next", "similar"):
        assert (looks[name].word, looks[name].holds) == (name, True)
    assert (looks["uniform"].word, looks["uniform"].holds) == ("uniform", None)  # no pattern that could move


def test_images_of_another_size_are_shuffled_by_the_patches_of_the_model():
    drawn, model = scenes(GRID, COUNT, 0), planted(forms(Bench(GRID, 0)), GRID)
    large = [each.repeat_interleave(2, -1).repeat_interleave(2, -2) for each in (drawn.images, drawn.masks)]
    found = vitlens.name_heads(model, large[0], masks=large[1])
    assert {name: head.attends.word for name, head in zip(ATTENDS, found.heads)} == ATTENDS
    assert [head.holds for head in found.heads] == [True] * 6 + [None]
    assert [head.looks.holds for head in found.heads[:3]] == [True] * 3


def test_every_head_is_there_though_it_may_have_no_word():
    side, make = MANY["mobilevit"]
    found = vitlens.name_heads(model_of(make(), size=(side, side)), images((side, side), batch=8))
    assert {head.layer for head in found.heads} == set(range(9))
    assert {(head.attends, head.looks, head.writes) for head in found.heads} == {(None, None, None)}


@pytest.mark.parametrize("family", ["ours", "beit"])  # the second adds a bias for every pair of positions
def test_shares_are_those_of_the_logits_that_the_model_computes(family):
    """The same keys whoever asks: the variance of the mean row."""
    model = FAMILIES[family]()
    batch = images(model.input_size, batch=12)
    found = vitlens.name_heads(model, batch)
    prefix = len(model.layout.prefix)
    scores = vitlens.capture(model, batch, "blocks.1.attention.scores")["blocks.1.attention.scores"].double()
    logits = scores[..., prefix:, prefix:]
    logits = logits - logits.mean(-1, keepdim=True)
    for head in [head for head in found.heads if head.layer == 1]:
        own = logits[:, head.head]
        mean = own.mean(1, keepdim=True).expand_as(own)
        shares = head.attends.shares
        same = shares["same keys by position"] + shares["same keys by content"]
        assert same == pytest.approx(float(mean.square().sum() / own.square().sum()), rel=1e-4)
        assert head.attends.spread == pytest.approx(float(own.square().mean().sqrt()), rel=1e-4)


# the fourth hardly matters, the fifth is dead, the last adds the same to all classes
GAINS = [(0, 40.0), (1, 40.0), (2, 40.0), (0, 0.2), (1, 0.0), (3, 40.0)]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_planted_heads_write_is_named_and_only_what_matters_is_said_to(seed):
    model, (pixels, labels) = writers(GAINS), pictures(60, seed)
    found = vitlens.name_heads(model, pixels, labels).heads
    assert [(head.writes.word, head.writes.state) for head in found] == [
        ("red", "shown to matter"), ("green", "shown to matter"), ("blue", "shown to matter"), ("red", "correlates"),
        (None, "nothing"), (None, "nothing"),
    ]  # fmt: skip
    told = [head.words.split("; ")[-1] for head in found]
    assert told == ["writes red (tested)", "writes green (tested)", "writes blue (tested)", "correlates with red",
                    "tells no class", "tells no class"]  # fmt: skip
    for head, name in zip(found[:3], ("red", "green", "blue")):
        assert head.writes.margin.value > 0.1
        assert head.writes.p < 0.05
        of_class = vitlens.direct_logit_attribution(model, pixels, name).heads[:, 0, head.head]
        others = [
            vitlens.direct_logit_attribution(model, pixels, each).heads[:, 0, head.head] for each in model.classes[:3]
        ]
        expected = roc_auc_score(labels == model.classes.index(name), of_class - torch.stack(others).mean(0))
        assert head.writes.auc.value == pytest.approx(expected)
        assert head.writes.auc.low <= expected <= head.writes.auc.high


def test_the_p_of_what_a_head_writes_is_welchs_one_sided_one_corrected_for_the_heads_with_a_word():
    """All images are said to be red: without the heads of green and blue, images of these lose less than the others."""
    model, (pixels, colours) = writers([(0, 40.0), (1, 40.0), (2, 40.0), (0, 0.02)]), pictures(60, 0)
    attributes = {name: colours == at for at, name in enumerate(model.classes[:3])}
    found = vitlens.name_heads(model, pixels, torch.zeros_like(colours), attributes=attributes).heads
    words = [head.writes for head in found]
    assert [each.word for each in words] == ["red", "green", "blue", "red"]
    plain = []
    for each in words:
        held = attributes[each.word]
        test = ttest_ind(each.falls[held], each.falls[~held], equal_var=False, alternative="greater")
        plain.append(test.pvalue)
    assert max(plain) > 0.5
    ranked = sorted(range(len(plain)), key=lambda at: plain[at])
    corrected = np.maximum.accumulate([(len(plain) - rank) * plain[at] for rank, at in enumerate(ranked)]).clip(0, 1)
    assert [words[at].p for at in ranked] == pytest.approx(list(corrected))


def test_nothing_is_invented_where_labels_are_permuted():
    """Of twenty permutations at most one names a class or an attribute for any head."""
    model, (pixels, labels) = writers(GAINS), pictures(60, 0)
    named = 0
    for seed in range(20):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
        found = vitlens.name_heads(model, pixels, labels[order], attributes={"first": labels[order] == 0}, seed=seed)
        named += any(head.writes.word for head in found.heads)
    assert named <= 1


def test_an_attribute_of_the_images_is_written_as_a_class_is():
    model, (pixels, labels) = writers(GAINS), pictures(60, 0)
    held = labels != 1
    (head, *_) = vitlens.name_heads(model, pixels, torch.zeros_like(labels), attributes={"not green": held}).heads[1:]
    assert head.writes.word == "not green"
    assert head.writes.auc.value > 0.95


def test_predictions_stand_for_labels_and_heads_of_windows_write_nothing_that_is_known():
    model, (pixels, _) = writers(GAINS), pictures(60, 0)
    with torch.no_grad():
        predicted = model(pixels).argmax(-1)
    found, same = (vitlens.name_heads(model, pixels, labels).heads for labels in ("predicted", predicted))
    assert [head.writes.auc for head in found] == [head.writes.auc for head in same]
    windowed = FAMILIES["torchvision-swin"]()
    batch = images(windowed.input_size, batch=50)
    given = vitlens.name_heads(windowed, batch, torch.zeros(50).long(), attributes={"odd": torch.arange(50) % 2 == 1})
    assert "what heads write" in given.notes[-1]
    assert all(head.writes is None for head in given.heads)


def test_words_that_need_nothing_else_are_given_and_the_others_are_told_why_not():
    model, batch = ours(), images((32, 48), batch=9)
    found = vitlens.name_heads(model, batch)
    assert all(head.writes is None and head.attends is not None for head in found.heads)
    for labels, said in ((None, "labels"), (torch.arange(9) % 3, "50 images")):
        (note,) = vitlens.name_heads(model, batch, labels).notes
        assert said in note
    few = vitlens.name_heads(model, batch[:2])
    assert [head.attends for head in few.heads] == [None] * len(few.heads)
    assert all(head.looks is not None for head in few.heads)
    with pytest.raises(InputError, match="masks"):
        vitlens.name_heads(model, batch, masks=torch.ones(3, 32, 48, dtype=torch.bool))
    with pytest.raises(UnsupportedError):
        vitlens.name_heads(small_cnn((16, 24)), images((16, 24)))

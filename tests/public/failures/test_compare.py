"""Two models on the same images: cells of errors, the paired test, class names; shape bias."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import vitlens
from tests.kit.reader import reader
from tests.kit.splits import answered
from vitlens import Split
from vitlens.errors import DataError, InputError

triples = st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=40)
COLUMNS = {(True, True): 0, (False, True): 1, (True, False): 2}


def compared(first: list[int], second: list[int], labels: list[int], **more: object):
    """Compare two readers with these answers, each on its images."""
    one = answered([10 * answer for answer in first], labels)
    two = answered([10 * answer for answer in second], labels)
    return vitlens.compare(reader(), reader(**more), one, second_images=two)


@given(triples)
@settings(max_examples=40, deadline=None)
def test_cells_are_what_they_say_and_the_test_is_mcnemars(rows):
    labels, first, second = (list(column) for column in zip(*rows))
    comparison = compared(first, second, labels)
    assert (
        list(comparison.counts.values()) == torch.bincount(comparison.cells, minlength=5).tolist()
    )
    for (label, one, two), cell in zip(rows, comparison.cells.tolist(), strict=True):
        both_wrong = 3 if one == two else 4
        assert cell == COLUMNS.get((one == label, two == label), both_wrong)
    only = []
    for answers in (rows, swapped(rows)):
        only.append(sum(wrong != label and right == label for label, wrong, right in answers))
    expected = stats.binomtest(min(only), sum(only), 0.5).pvalue if sum(only) else 1.0
    assert comparison.p == pytest.approx(expected)
    one, two = comparison.accuracies()
    assert comparison.difference().value == pytest.approx(100 * (one.value - two.value))
    assert one.value == pytest.approx(sum(label == answer for label, answer, _ in rows) / len(rows))


def test_images_that_share_a_source_count_once():
    """Two equal readers, each right on all or none of the 8 images of a source, are rarely declared
    different.
    """
    declared = 0
    runs = 60
    generator = torch.Generator().manual_seed(0)
    sources = torch.arange(40).repeat_interleave(8)
    for _ in range(runs):
        right = (torch.rand(2, 40, generator=generator) < 0.7).repeat_interleave(8, dim=1)
        one, two = (
            answered((10 * correct.long()).tolist(), [1] * 320, groups=sources) for correct in right
        )
        comparison = vitlens.compare(reader(), reader(), one, second_images=two)
        declared += comparison.p <= 0.05
        assert comparison.p == pytest.approx(sign_test(right[0][::8], right[1][::8]))
    assert declared <= 0.12 * runs


def sign_test(first: Tensor, second: Tensor) -> float:
    only = int((first & ~second).sum()), int((second & ~first).sum())
    return float(stats.binomtest(only[0], sum(only), 0.5).pvalue)


def swapped(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(label, second, first) for label, first, second in rows]


def test_classes_are_matched_by_name():
    comparison = compared([0, 1, 2], [2, 1, 3], [0, 1, 2], classes=("c", "b", "a", "d"))
    assert comparison.first.classes == comparison.second.classes == ("a", "b", "c", "d")
    assert comparison.second.predictions.tolist() == [0, 1, 3]
    assert comparison.cells.tolist() == [0, 0, 2]
    torch.testing.assert_close(
        comparison.second.confidence,
        torch.tensor(5.0).exp().div(torch.tensor(5.0).exp() + 3).expand(3),
    )


class Knowing(nn.Module):
    """A classifier that looks its answers up by the first pixels of an image."""

    def __init__(self, split: Split, answers: Tensor) -> None:
        super().__init__()
        pixels = split.source.read(torch.arange(len(split)))
        self.known = {
            tuple(image.flatten()[:64].tolist()): answer
            for image, answer in zip(pixels, answers.tolist())
        }
        self.classes = len(split.classes)

    def forward(self, images: Tensor) -> Tensor:
        keys = (tuple(image.flatten()[:64].tolist()) for image in (images * 255).round().byte())
        return nn.functional.one_hot(
            torch.tensor([self.known.get(key, 0) for key in keys]), self.classes
        ).float()


def bias_of(answers: Tensor, split: Split):
    model = vitlens.wrap(
        Knowing(split, answers),
        image_size=32,
        mean=(0, 0, 0),
        std=(1, 1, 1),
        classes=split.classes,
        alias="knowing",
    )
    return vitlens.shape_bias(model, split)


def test_the_shape_bias_of_a_classifier_of_shapes_of_textures_and_of_neither():
    conflicts = vitlens.load_data("shapes-conflict", limit=60)
    words = [re.findall("[a-z]+(?=[0-9])", file.rpartition("/")[2]) for file in conflicts.files]
    shape, texture = torch.tensor(
        [[conflicts.classes.index(word) for word in pair] for pair in words]
    ).T
    assert (shape != texture).all()
    for answers, expected in ((shape, 1.0), (texture, 0.0)):
        bias = bias_of(answers, conflicts)
        assert (bias.bias.value, bias.bias.n) == (expected, 60)
        assert bias.bias.low <= expected <= bias.bias.high
        assert (bias.shape.value, bias.texture.value) == (expected, 1 - expected)
        assert [(one.shape, one.share) for one in bias.by_class] == [
            (one.n * expected, expected) for one in bias.by_class
        ]
        assert sum(one.n for one in bias.by_class) == 60
    neither = (shape + 1 + (texture == (shape + 1) % 8).long()) % 8
    assert bias_of(neither, conflicts).bias is None
    neither[:3], neither[3:4] = shape[:3], texture[3:4]
    bias = bias_of(neither, conflicts)
    assert (bias.bias.value, bias.bias.n, bias.shape.value) == (0.75, 4, 3 / 60)


# shape and texture agree in the last
@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (lambda: vitlens.compare(reader(("x", "y")), reader(), answered([0], [0])), InputError),
        (lambda: vitlens.compare(reader(), reader(), answered([0], None)), DataError),
        (
            lambda: vitlens.compare(
                reader(), reader(), answered([0], [0]), second_images=answered([0], [1])
            ),
            InputError,
        ),
        (lambda: vitlens.shape_bias(reader(), answered([0], [0])), DataError),
        (
            lambda: vitlens.shape_bias(
                vitlens.load("vit-digits"), vitlens.load_data("shapes", limit=2)
            ),
            DataError,
        ),
    ],
)
def test_refusals(refused, error):
    with pytest.raises(error):
        refused()


def test_the_number_of_different_labels_is_in_the_message():
    with pytest.raises(InputError, match="at 1 of 3"):
        vitlens.compare(
            reader(),
            reader(),
            answered([0] * 3, [0, 1, 0]),
            second_images=answered([0] * 3, [0] * 3),
        )

"""`vitlens.evaluate`: order of answers, classes matched by name, intervals with groups."""

import pytest
import torch
from torch import nn

import vitlens
from tests.kit.reader import reader
from tests.kit.splits import answered, split_of
from tests.kit.tiny import model_of
from vitlens.errors import DataError, InputError, NonFiniteError
from vitlens.names import imagenet_classes
from vitlens.uncertainty import Estimate, wilson


def test_answers_come_in_order_whatever_the_batch():
    model = reader().train()
    split = answered([0, 10, 20, 10], [0, 1, 2, 0])
    steps = []
    result = vitlens.evaluate(model, split, batch_size=3, advance=steps.append)
    assert result.predictions.tolist() == [0, 1, 2, 1]
    assert result.correct.tolist() == [True, True, True, False]
    assert steps == [3, 1]
    assert torch.equal(result.logits, vitlens.evaluate(model, split).logits)
    assert not result.logits.is_inference()
    assert torch.equal(result.probabilities, result.logits.softmax(-1))
    assert torch.equal(result.confidence, result.probabilities.amax(-1))


def test_classes_are_matched_by_name_or_where_they_are_only_numbered_by_position():
    shuffled = vitlens.evaluate(reader(("c", "a", "b")), answered([0, 10, 20], [2, 0, 1]))
    assert shuffled.classes == ("a", "b", "c")
    assert shuffled.correct.all()
    some = vitlens.evaluate(reader(("x", "b", "y", "a")), answered([30, 10], [0, 1], ("a", "b")))
    assert some.classes == ("a", "b", "x", "y")
    assert some.correct.all()
    numbered = vitlens.evaluate(reader(("0", "1")), answered([0, 10], [0, 1], ("cat", "dog")))
    assert (numbered.classes, numbered.correct.tolist()) == (("cat", "dog"), [True, True])
    assert (shuffled.note, some.note) == ("", "")
    assert "position" in numbered.note


MODELS = {  # the model's classes, in the order of its logits, and the data's
    "numbers as text": (tuple(map(str, range(12))), tuple(sorted(map(str, range(12))))),
    "some of the numbers": (tuple(map(str, range(12))), ("1", "10", "2")),
    "numbers with zeros": (
        tuple(map(str, range(12))),
        tuple(f"{number:02d}" for number in reversed(range(12))),
    ),
    "names in another case": (
        ("golden_retriever", "Tabby Cat", "box-turtle"),
        ("BOX TURTLE", "golden retriever"),
    ),
    "wnids of the model": (("n01443537", "n01440764"), ("tench", "goldfish")),
    "wnids with names": (("tench", "goldfish", "cock"), ("n01443537-goldfish", "n01440764-tench")),
}


@pytest.mark.parametrize("case", MODELS)
def test_names_that_agree_are_matched_by_name_whatever_their_order(case):
    model, data = MODELS[case]
    folded = {"n01443537": "goldfish", "n01440764": "tench"}

    def key(name: str) -> str:
        name = folded.get(name[:9], name)
        return name.lower().replace("_", " ").replace("-", " ").lstrip("0") or "0"

    keys = [key(name) for name in model]
    logits = [keys.index(key(name)) for name in data]
    result = vitlens.evaluate(
        reader(model), answered([10 * logit for logit in logits], list(range(len(data))), data)
    )
    assert result.correct.all()
    assert result.classes[: len(data)] == data
    assert result.note == ""


def test_a_match_by_position_names_the_order_and_says_where_timm_has_another():
    names = tuple(sorted(f"class{number}" for number in range(11)))
    numbers = tuple(map(str, range(11)))
    result = vitlens.evaluate(reader(numbers), answered([0, 20], [0, 2], names))
    assert result.correct.all()
    assert "class10" in result.note
    assert "timm" in result.note
    indices = vitlens.evaluate(
        reader(("a", "b", "c")), answered([0, 10, 20], [0, 1, 2], ("0", "1", "2"))
    )
    assert (indices.correct.all().item(), "position" in indices.note) == (True, True)
    with pytest.raises(InputError):  # counted from 1: the last is none of the model's
        vitlens.evaluate(reader(("a", "b", "c")), answered([0, 10, 20], [0, 1, 2], ("1", "2", "3")))


def test_imagenet_answers_for_the_sixteen_shapes_by_the_mean_probability_of_each_group():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 6, 1000))
    model = model_of(module, size=(4, 6), classes=imagenet_classes())
    pixels = torch.rand(4, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    split = split_of(pixels, torch.tensor([0, 1, 2, 0]), ("cat", "knife", "dog"))
    result = vitlens.evaluate(model, split)
    assert result.classes[:3] == ("cat", "knife", "dog")
    assert len(result.classes) == len(set(result.classes)) == 16
    with torch.no_grad():
        probabilities = model(vitlens.images(split, model)).softmax(1)
    # Geirhos 2019
    groups = {
        "cat": slice(281, 287),
        "knife": slice(499, 500),
        "elephant": slice(385, 387),
    }
    for name, group in groups.items():
        group_probability = result.logits[:, result.classes.index(name)].exp()
        torch.testing.assert_close(group_probability, probabilities[:, group].mean(1))
    all_known = split_of(pixels, torch.tensor([0, 1, 2, 0]), imagenet_classes())
    torch.testing.assert_close(vitlens.evaluate(model, all_known).probabilities, probabilities)


def names(*classes: str) -> tuple[list[int], list[int], tuple[str, ...]]:
    return [0], [0], classes


REFUSED = {
    "no labels": (reader, ([0], None), DataError, "vitlens predict"),
    "no images": (reader, ([], []), DataError, None),
    "a model that breaks": (reader, ([0, 10, 255], [0, 1, 2]), NonFiniteError, "image 2"),
    "fewer classes": (
        lambda: reader(("0", "1", "2")),
        names("cat", "dog"),
        InputError,
        "data: 'cat', 'dog'",
    ),
    "numbers in another order": (
        lambda: reader(("1", "0")),
        names("cat", "dog"),
        InputError,
        "model: '1', '0'",
    ),
    "a class more": (reader, names("c", "eel"), InputError, "model: 'a', 'b'; .*classes="),
    "many": (
        lambda: reader(("a",)),
        names(*"56789xy"),
        InputError,
        "'5', '6', '7', '8', '9' and 2 more",
    ),
    "twice the same": (lambda: reader(("a", "a", "b")), names("b", "a"), InputError, None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_evaluated_is_refused(case):
    make, arguments, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        vitlens.evaluate(make(), answered(*arguments), batch_size=2)


def test_a_file_is_named_and_of_two_models_the_one_that_does_not_know_the_classes():
    with pytest.raises(NonFiniteError, match=r"on b\.png"):
        vitlens.evaluate(reader(), answered([0, 255], [0, 1], files=("a.png", "b.png")))
    with pytest.raises(InputError, match=r"the second model .* in the data: 'c'"):
        vitlens.compare(reader(), reader(("a", "b")), answered([0, 10, 20], [0, 1, 2]))


def accuracy(right: list[bool], groups: list[int] | None = None) -> Estimate:
    """Return the accuracy of the result."""
    sources = None if groups is None else torch.tensor(groups)
    reds = [10 * (not is_right) for is_right in right]
    split = answered(reds, [0] * len(right), groups=sources)
    return next(iter(vitlens.evaluate(reader(), split).summary())).value


def test_accuracy_is_wilsons_unless_images_share_a_source():
    right = [True, True, False, True]
    assert accuracy(right) == accuracy(right, [0, 1, 2, 3]) == wilson(3, 4)
    half_right = accuracy(right, [0, 0, 1, 1])
    assert (half_right.value, half_right.n) == (0.75, 4)
    assert 0 <= half_right.low < accuracy(right).low  # two groups tell less than four images
    assert half_right.high <= 1
    assert accuracy([True] * 6, [0, 0, 1, 1, 2, 2]) == Estimate(1.0, wilson(3, 3).low, 1.0, 6)
    assert accuracy([False] * 4, [0, 0, 1, 1]) == Estimate(0.0, 0.0, wilson(0, 2).high, 4)
    # nothing is known about other groups
    assert accuracy([True, False], [0, 0]) == Estimate(0.5, 0.0, 1.0, 2)

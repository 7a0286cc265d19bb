"""Phrases as classes: `Model.with_text`, and --text of look and explain."""

import re
import shlex

import pytest
import torch
from torch.nn import functional as F

import vitlens
from tests.kit.commands import refusal, report
from tests.kit.objectives import scenes
from tests.kit.select import select, values_of
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder
from vitlens.errors import InputError, UnsupportedError

open_clip = pytest.importorskip(
    "open_clip", reason="needs the extra clip: pip install open_clip_torch"
)

from tests.kit.models.clip import (  # noqa: E402
    registered,
    similarities,
    tiny,
    with_truncating_tokenizer,
)
from tests.kit.tiny import images as noise  # noqa: E402

MODEL = "clip=open-clip:tiny-clip@random"
MARKED = "a <b>van</b> | **x**"


def typed(out, line, *, code=0):
    """Return the record of a line as it is typed in a shell."""
    registered()
    words = [*shlex.split(line), "--device", "cpu", "--quiet", "--out", str(out)]
    assert run(words) == code, line
    return read_folder(out)


def cosines(model, images, *texts):
    """Return open_clip's similarity of images to the mean embedding of each list of texts."""
    library = model.module.text.model
    tokenizer = open_clip.get_tokenizer("tiny-clip")
    with torch.no_grad():
        embedded = F.normalize(library.encode_image(model.prepare(images)), dim=-1)
        columns = []
        for prompts in texts:
            each = F.normalize(library.encode_text(tokenizer(prompts)), dim=-1)
            columns.append(embedded @ F.normalize(each.mean(0), dim=-1))
    return torch.stack(columns, 1)


def test_a_phrase_is_the_mean_of_its_prompts_by_the_library():
    model = tiny()
    images = noise(model.input_size, batch=3)
    phrases = model.with_text(["a dog", "grass "])
    assert phrases.classes == ("a dog", "grass")
    dogs = ["a dog", "a photo of a dog.", "an image of a dog.", "a picture of a dog."]
    grass = ["grass", "a photo of a grass.", "an image of a grass.", "a picture of a grass."]
    expected = cosines(model, images, dogs, grass)
    torch.testing.assert_close(similarities(phrases, phrases(images)), expected, atol=1e-5, rtol=0)
    one = model.with_text(["a dog"], templates=["{}"])
    exact = similarities(one, one(images))
    torch.testing.assert_close(exact, cosines(model, images, ["a dog"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("template", "phrase", "text"),
    [
        ("a photo of a {}.", "dog", "a photo of a dog."),
        ("a photo of a {}.", "a dog", "a photo of a dog."),
        ("a photo of a {}.", "The dog on An isle", "a photo of The dog on An isle."),
        ("a photo of a {}.", "another dog", "a photo of a another dog."),
        ("A {}", "an owl", "an owl"),
        ("a photo of a  {}.", "a dog", "a photo of a dog."),
        ("{}", "a dog", "a dog"),
        ("no{}", "a dog", "noa dog"),
        ("the {}, not a {}", "a dog", "a dog, not a a dog"),
    ],
)
def test_the_article_of_a_phrase_replaces_that_of_a_template(template, phrase, text):
    model = tiny()
    images = noise(model.input_size, batch=2)
    by_template = model.with_text([phrase], templates=[template])
    expected = cosines(model, images, [text])
    torch.testing.assert_close(
        similarities(by_template, by_template(images)), expected, atol=1e-5, rtol=0
    )


def test_a_phrase_that_a_tokenizer_of_transformers_would_truncate_is_refused():
    model = with_truncating_tokenizer()
    fitting = model.with_text(["dog " * 22], templates=["{}"])
    assert len(fitting.classes) == 1
    with pytest.raises(InputError, match=r"at most 24 tokens for .*, found 25"):
        model.with_text(["dog " * 23], templates=["{}"])


def test_a_single_phrase_is_removed_and_masked_by_its_similarity():
    """A softmax over one class is 1 whatever is removed."""
    model = tiny()
    images = noise(model.input_size, batch=2)
    one = model.with_text(["a dog"])
    maps = vitlens.explain(one, images, targets="a dog", method="rise", masks=40)
    assert float(maps.std()) > 0
    assert float(maps.mean()) == pytest.approx(
        float(similarities(one, one(images)).mean()), abs=0.2
    )
    among = vitlens.relevance(model.with_text(["a van", "a dog"]), images, targets="a dog")
    torch.testing.assert_close(
        vitlens.relevance(one, images, targets="a dog"), among, atol=1e-6, rtol=1e-3
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "found none"),
        (["a dog", " "], "found an empty one"),
        ("a dog", r"found the text 'a dog'"),
        (["a dog", "A  dog"], "found 'A  dog' twice"),
        (["dog " * 40], "at most 24 tokens for open-clip:tiny-clip, found 42"),
    ],
)
def test_wrong_phrases_are_refused(texts, message):
    with pytest.raises(InputError, match=message):
        tiny().with_text(texts)


def test_a_model_that_embeds_no_texts_is_refused():
    with pytest.raises(UnsupportedError, match="embeds no texts"):
        vitlens.load("vit-digits").with_text(["a dog"])
    with pytest.raises(InputError, match="either classes= or text="):
        vitlens.load("vit-digits", text=["a"], classes=("b",))


def test_explain_has_the_maps_of_each_phrase_on_every_image(tmp_path, pictures):
    line = f"explain {MODEL} --images {pictures} --method relevance --limit 3"
    record = typed(tmp_path / "out", f"{line} --text 'a dog' --text '{MARKED}'")
    assert record.aliases == ("clip-a-dog", "clip-a-b-van-b-x")
    model = vitlens.load(MODEL)
    images = vitlens.images(pictures, model)[:3]
    phrases = model.with_text(["a dog", MARKED])
    expected = similarities(phrases, phrases(images))
    for column, alias in enumerate(record.aliases):
        maps = vitlens.relevance(phrases, images, targets=torch.full((3,), column))
        stored = torch.from_numpy(record.maps[alias].maps[0])
        torch.testing.assert_close(stored, maps, atol=1e-5, rtol=1e-3)
        rows = select(record.shown, model=alias)
        assert values_of(rows, "similarity") == pytest.approx(
            expected[:, column].tolist(), abs=1e-3
        )
        assert values_of(rows, "target") == 3 * [phrases.classes[column]]
        probabilities = phrases(images).softmax(-1)[:, column].tolist()
        assert values_of(rows, "target_probability") == pytest.approx(probabilities, abs=1e-3)


@pytest.mark.slow  # every check of three methods
def test_a_single_phrase_passes_the_same_checks_by_its_similarity(tmp_path):
    line = f"explain {MODEL} --data shapes --limit 12 --method relevance,gradcam --verify"
    record = typed(tmp_path / "out", f"{line} --text 'a dog'")
    assert record.aliases == ("clip",)
    checks = set(values_of(record.checks, "check"))
    assert {"imputed", "mean", "weights", "shifts"} <= checks
    assert not any("unchanged" in str(row.lacks) for row in record.checks)
    assert not record.orders
    assert set(values_of(record.league, "deletion_accuracy")) == {None}
    assert set(values_of(record.stages, "kept")) == {None}
    assert set(values_of(record.shown, "probability")) == {None}
    curves = record.curves["clip"]
    mean = sum(values_of(record.shown, "similarity")) / 12
    assert curves.deletion[:, 0] == pytest.approx(mean, abs=1e-3)
    sections = values_of(report(record).sections, "title")
    assert "Do maps depend on the weights?" in sections


def test_look_has_the_phrases_in_their_order_with_similarities(tmp_path, pictures):
    line = f"look {pictures}/0.png --model {MODEL} --text grass --text '{MARKED}' --text 'a dog'"
    record = typed(tmp_path / "out", line)
    model = vitlens.load(MODEL).with_text(["grass", MARKED, "a dog"])
    images = vitlens.images(pictures / "0.png", model)
    expected = similarities(model, model(images))[0].tolist()
    assert values_of(record.phrases, "phrase") == list(model.classes)
    assert values_of(record.phrases, "similarity") == pytest.approx(expected, abs=1e-5)
    assert sum(values_of(record.phrases, "probability")) == pytest.approx(1, abs=1e-5)
    for column in range(3):
        maps = vitlens.explain(
            model, images, targets=torch.tensor([column]), method=record.look[0].method
        )
        stored = torch.from_numpy(record.maps.phrases[:, column])
        torch.testing.assert_close(stored, maps, atol=1e-5, rtol=1e-3)
    assert record.heads
    assert report(record).first.answer


def test_markup_in_a_phrase_is_text_in_every_report(tmp_path, pictures):
    phrase = "a <b>van</b> \x1b[31m![x](http://x)"
    registered()
    line = ["look", str(pictures / "0.png"), "--model", MODEL, "--text", phrase, "--text", "dog"]
    assert run([*line, "--device", "cpu", "--quiet", "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    text = (tmp_path / "out" / "report.md").read_text()
    assert "\x1b" not in page + text
    assert "<b>van" not in page
    prose = re.sub(r"`[^`]*`|(?s:```.*?```)", "", text)  # code is not read as markup
    assert re.findall(r"(?<!\\)<b>|(?<!\\)\]\(http://x", prose) == []


def test_with_one_phrase_no_probability_is_shown_and_no_head_is_ablated(tmp_path, pictures):
    record = typed(tmp_path / "out", f"look {pictures}/0.png --model {MODEL} --text 'a dog'")
    assert values_of(record.phrases, "probability") == [None]
    assert (record.heads, record.predictions) == ((), ())
    result = vitlens.look(vitlens.load(MODEL).with_text(["a dog"]), pictures / "0.png")
    assert result.maps.shape == (1, 1, 4, 4)
    torch.testing.assert_close(result.probabilities, result.similarities)
    assert "%" not in repr(result)


WRONG = {
    f"explain {MODEL} --text a --target b --images {{pictures}}": "--text or --target",
    f"explain {MODEL} --text a --auto --images {{pictures}}": "found --auto",
    f"explain {MODEL} --text a --classes f --images {{pictures}}": "--classes",
    f"explain {MODEL} --text a --text A --images {{pictures}}": "'A' twice",
    f"explain {MODEL} --text= --images {{pictures}}": "empty",
    f"explain {MODEL} --text {40 * 'x-'} --images {{pictures}}": "at most 24 tokens",
    "explain vit-digits --text a --images {pictures}": "embeds no texts",
    "look {pictures}/0.png --text a": "--model",
    f"look {{pictures}}/0.png --model {MODEL} {' '.join(f'--text {n}' for n in range(13))}": (
        "at most 12 phrases"
    ),
    f"predict {MODEL} --quiet --text a --images {{pictures}}": "add a second --text",
    f"predict {MODEL} --images {{pictures}}": "--text PHRASE",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_lines_are_one_line(line, pictures, tmp_path, capsys, monkeypatch):
    registered()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text("dog\nvan\n")
    assert WRONG[line] in refusal(capsys, line.format(pictures=pictures))


def test_two_phrases_are_classes_for_other_commands(tmp_path, pictures):
    registered()
    line = f"predict {MODEL} --images {pictures} --limit 2 --text cat --text dog"
    record = typed(tmp_path / "out", line)
    assert {row.class_1 for row in record.predictions} <= {"cat", "dog"}


@pytest.mark.slow  # trains a CLIP, some minutes
def test_the_phrase_decides_on_which_of_two_shapes_the_evidence_lies(tmp_path):
    """Two shapes side by side: the map for the name of one has more of its mass on its side."""
    shape = "--patch-size 8 --dim 64 --heads 4 --batch-size 32 --epochs 12"
    typed(tmp_path / "clip", f"train vit-mini --objective clip --data shapes {shape}")
    split = scenes("test").limit(160)
    phrases = vitlens.load(str(tmp_path / "clip")).with_text(
        [f"a {name}" for name in split.classes]
    )
    (batch,) = split.batches(160)
    assert split.labels is not None
    labels = split.labels
    right = phrases(batch.images).argmax(1) == labels
    assert float(right.double().mean()) > 0.6  # by chance 1 of 8
    known = right.nonzero()[:, 0]
    other = known.roll(1)
    differs = labels[known] != labels[other]
    first = known[differs]
    second = other[differs]
    pairs = torch.cat([batch.images[first], batch.images[second]], -1)
    shares = []
    for indices in (first, second):
        maps = vitlens.relevance(phrases, pairs, targets=labels[indices])
        left, whole = maps[..., : maps.shape[-1] // 2].sum((1, 2)), maps.sum((1, 2))
        shares.append(left / whole.clamp_min(1e-9))
    gain = shares[0] - shares[1]
    error = gain.std() / len(gain) ** 0.5
    assert float(gain.mean()) > 3 * float(error)

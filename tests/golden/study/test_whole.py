"""The complete study: trained presets, a complete folder for each chapter, and one page."""

import shlex
from dataclasses import replace

import pytest
from PIL import Image

from tests.kit.axes import cut_off, shown, texts
from tests.kit.commands import few_chapters, ran, refusal, stopping_at
from tests.kit.contradictions import contradictions
from tests.kit.first_page import check_first_page
from tests.kit.first_page_answers import BETTER
from tests.kit.portfolio import (
    drawn_in,
    headings,
    known_numbers,
    known_sentences,
    numbers_of,
    sentences_between,
)
from tests.kit.select import select_one, values_of
from tests.kit.whole_folder import whole_folder
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder
from vitlens.commands.study.report import REPORT

LINE = "study {models} --data digits --limit 10 --batch-size 5"
INSPECTED = [f"{word}-mine" for word in ("attention", "rollout", "stats", "ablate")]
LONG = ("explain", "compare", "attack", "features", "profile")


@pytest.fixture(scope="module")
def inspected(tiny_vit, tmp_path_factory):
    """Return a study of a ViT and a preset, without the chapters that take long.

    The slow test_a_whole_study runs all chapters.
    """
    with few_chapters(*LONG):
        line = f"{LINE.format(models=f'mine={tiny_vit} resnet20')} --epochs 1"
        return ran(tmp_path_factory.mktemp("study") / "out", line)


def test_a_preset_is_trained_and_every_chapter_is_a_folder_of_its_own(inspected):
    chapters = [f"chapters/{name}" for name in ("train-resnet20", "evaluate", *INSPECTED)]
    assert values_of(inspected.chapters, "folder", "cached") == [
        (chapter, False) for chapter in chapters
    ]
    evaluated = read_folder(inspected.folder / "chapters/evaluate").metrics
    for alias in ("mine", "resnet20"):
        assert inspected.metrics[f"accuracy/{alias}"] == evaluated[f"accuracy/{alias}"]
    assert "localisation/mine/pointing/rollout-mean" in inspected.metrics
    assert inspected.better("accuracy/mine") == "higher"
    assert inspected.better("calibration_error/mine") == "lower"
    whole_folder(inspected.folder, "study", drawn=False)


def test_what_few_images_leave_undecided_is_said_on_the_first_page(inspected):
    first = REPORT(inspected).first
    undecided = select_one(first.unknown, lead=BETTER.lead).text
    for score in inspected.of("evaluate")[0].record.scores:
        assert score.model in undecided
    assert BETTER.lead not in values_of(first.answer, "lead")


def how_it_works(record):
    """Return the only section about how the model works."""
    (section,) = [section for section in REPORT(record).sections if "work" in section.title]
    return section


def test_how_the_vit_works_is_one_picture_with_a_row_for_each_layer(inspected):
    section = how_it_works(inspected)
    (figure,) = section.figures
    assert section.tables == ()
    stats = inspected.about("stats", "mine").record
    ablate = inspected.about("ablate", "mine").record
    drawn = figure.draw()
    names = {f"L{row.layer}" for row in stats.layers}
    assert names <= set(texts(drawn))
    assert len(shown(drawn)) >= len(stats.heads)
    said = " ".join(sentence.text for sentence in section.sentences)
    assert said.count("**Late") == 1
    assert f"{100 * ablate.lens[-1].accuracy.value:.0f} %" in said
    assert (inspected.folder / "figures" / f"{figure.name}.png").is_file()


@pytest.mark.parametrize(
    ("word", "part"), [("ablate", "logit lens"), ("attention", "attention patterns")]
)
def test_a_chapter_that_is_missing_is_named_in_place_of_its_part_of_the_picture(
    inspected, word, part
):
    remaining = tuple(row for row in inspected.chapters if row.word != word)
    section = how_it_works(replace(inspected, chapters=remaining))
    (reason,) = [sentence.text for sentence in section.sentences if part in sentence.text]
    assert word in reason
    assert cut_off(section.figures[0].draw()) == []


def test_the_explorer_follows_from_the_chapters_of_the_vit(inspected):
    stats = inspected.about("stats", "mine").record
    ablate = inspected.about("ablate", "mine").record
    explorer = REPORT(inspected).explorer
    for row in ablate.heads:
        assert explorer.importance[row.layer, row.head] == pytest.approx(row.loss.value)
        assert explorer.labels[row.layer][row.head] == (row.label or "")
    for row in stats.names:
        assert explorer.words[row.layer][row.head] == row.words


def test_the_report_of_a_study_that_was_stopped_shows_its_finished_chapters(
    tiny_vit, tmp_path, capsys
):
    out = tmp_path / "out"
    with stopping_at("rollout"), few_chapters(*LONG):
        line = f"{LINE.format(models=f'mine={tiny_vit}')} --device cpu --quiet --out {out}"
        assert run(line.split()) == 130
    said = capsys.readouterr().err
    assert f"vitlens report {out}" in said
    assert run(["report", str(out)]) == 0
    record = read_folder(out)
    assert record.status == "interrupted"
    assert values_of(record.chapters, "word") == ["evaluate", "attention"]
    assert "accuracy/mine" in record.metrics
    text = (out / "report.md").read_text()
    assert "interrupted" in text
    for row in record.chapters:
        assert f"]({row.folder}/report.md)" in text
    check_first_page(REPORT(record))
    with stopping_at("rollout"), few_chapters(*LONG):
        assert run(shlex.split(said.partition("continue with vitlens ")[2])) == 130
    assert [row.cached for row in read_folder(out).chapters] == [True, True]


@pytest.fixture(scope="module")
def written(inspected):
    """Return the portfolio report of that study, as markdown."""
    assert run(["report", str(inspected.folder), "--portfolio", "--html"]) == 0
    return inspected.folder / "portfolio.md"


def test_the_portfolio_has_the_parts_of_a_report_and_the_figures_that_it_names(written):
    titles = list(headings(written))
    assert titles == [
        "1 Introduction",
        "2 Methods",
        "3 Results",
        "4 Failure analysis",
        "5 Insights",
        "6 Limits",
        "7 Future work",
        "References",
        "Appendix: how to repeat it",
    ]
    for name in drawn_in(written):
        assert (written.parent / "figures" / f"{name}.png").is_file()
    page = written.with_suffix(".html").read_text()
    assert "Content-Security-Policy" in page
    assert 'src="http' not in page


def test_every_number_of_the_portfolio_is_one_of_the_record(inspected, written):
    stated = numbers_of(written.read_text())
    assert len(stated) > 50
    counted = {str(number) for number in range(13)}  # of what the sentences list
    assert stated - known_numbers(inspected) <= counted


def test_every_sentence_of_results_and_failures_is_one_of_a_chapter(inspected):
    sentences = sentences_between(inspected, "3 Results", "5 Insights")
    assert sentences
    assert set(sentences) <= known_sentences(inspected)
    assert len(sentences) == len(set(sentences))


def test_a_portfolio_is_refused_for_another_command_and_for_a_kind(inspected, capsys):
    chapter = inspected.folder / inspected.chapters[-1].folder
    assert "vitlens study --portfolio" in refusal(capsys, f"report {chapter} --portfolio")
    assert "--portfolio" in refusal(capsys, "study --kind pooling --portfolio")


def test_a_dictionary_is_a_chapter_with_two_questions(golden, tiny_vit, tmp_path):
    file = golden("sae").folder / "dictionary.safetensors"
    line = f"{LINE.format(models=f'mine={tiny_vit}')} --dictionary {file}"
    with few_chapters(*LONG, "attention", "rollout", "stats", "ablate"):
        record = ran(tmp_path / "out", line)
    (chapter,) = record.of("sae")
    (row,) = [row for row in chapter.record.dictionaries if row.dictionary == "topk"]
    assert not chapter.record.setup[0].trained
    assert record.metrics[f"explained_variance/mine/{row.dictionary}"] == row.variance
    sections = [section for section in REPORT(record).sections if section.more == chapter.report]
    assert len(sections) == 2
    said = " ".join(sentence.text for part in sections for sentence in part.sentences)
    assert f"{100 * row.variance.value:.1f} %" in said
    assert drawn_in(written_portfolio(record))


def written_portfolio(record):
    """Return the portfolio report of a study, as markdown."""
    assert run(["report", str(record.folder), "--portfolio"]) == 0
    return record.folder / "portfolio.md"


def test_a_dictionary_of_another_model_and_of_a_kind_is_refused(golden, tmp_path, capsys):
    file = golden("sae").folder / "dictionary.safetensors"
    line = f"study vit-digits --data digits --limit 10 --dictionary {file} --out {tmp_path / 'out'}"
    assert "another model" in refusal(capsys, line)
    assert not (tmp_path / "out").exists()
    assert "--dictionary" in refusal(capsys, f"study --kind pooling --dictionary {file}")


@pytest.mark.slow
def test_a_whole_study(tiny_vit, tmp_path):
    """Attacks, searches and checks of maps are tested where they are made: here few steps and
    images will do.
    """
    out = tmp_path / "out"
    with few_chapters():
        record = ran(out, f"{LINE.format(models=f'mine={tiny_vit} resnet20')} --epochs 1")
    rest = (
        "explain-mine",
        "explain-resnet20",
        "compare",
        "attack",
        "attack-cw",
        "features",
        "profile",
    )
    assert values_of(record.chapters, "folder") == [
        f"chapters/{name}" for name in ("train-resnet20", "evaluate", *INSPECTED, *rest)
    ]
    assert record.metric("parameters/resnet20").value == 269_722
    assert record.metric("faithfulness/mine/gap/relevance").n == 4
    document = REPORT(record)
    check_first_page(document)
    assert not list(contradictions(claim for chapter in record.parts for claim in chapter.claims))
    assert set(values_of(document.sections, "more")) <= set(values_of(record.parts, "report"))
    assert len(document.figures) <= 12
    whole_folder(out, "study", drawn=False)


@pytest.mark.slow
def test_a_second_study_of_the_same_models_repeats_no_chapter(
    tiny_vit, tiny_cnn, tmp_path, monkeypatch
):
    monkeypatch.setenv("VITLENS_CACHE", str(tmp_path / "cache"))
    line = LINE.format(models=f"mine={tiny_vit} other={tiny_cnn}")
    first = ran(tmp_path / "first", f"{line} --seed 0")
    second = ran(tmp_path / "second", f"{line} --seed 0")
    third = ran(tmp_path / "third", f"{line} --seed 1")
    # timings are measured anew
    assert [row.word for row in second.chapters if not row.cached] == ["profile"]
    timed = read_folder(second.about("profile", "").record.folder).metrics
    same = {name: value for name, value in first.metrics.items() if name not in timed}
    assert same == {name: value for name, value in second.metrics.items() if name not in timed}
    with_path = [
        path for path in second.folder.rglob("*.[jm]*") if str(first.folder) in path.read_text()
    ]
    assert with_path == []
    for row in third.chapters:
        assert not row.cached


@pytest.mark.slow  # every chapter that needs no labels
def test_a_study_of_own_images_leaves_out_what_needs_labels(pictures, tmp_path):
    record = ran(tmp_path / "out", f"study vit-digits --images {pictures} --predicted")
    words = values_of(record.chapters, "word")
    assert words == ["attention", "rollout", "stats", "ablate", "explain", "attack", "profile"]
    assert values_of(record.left_out, "chapter") == ["evaluate", "compare", "features"]
    for name in record.metrics:
        assert name.split("/")[0] != "accuracy"


def test_classes_that_a_model_does_not_know_are_refused_before_any_chapter(
    tiny_vit, tmp_path, capsys
):
    """And the folder that this leaves does not block the next try."""
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "data" / name / "1.png")
    line = (
        f"study mine={tiny_vit} --data {tmp_path / 'data'} --device cpu --quiet --out "
        f"{tmp_path / 'out'}"
    )
    for _ in range(2):
        assert "only in the data: 'cat', 'dog'" in refusal(capsys, line)
        assert not (tmp_path / "out" / "chapters").exists()


def test_a_folder_without_class_folders_has_labels_from_a_table(tiny_vit, tmp_path, capsys):
    """The labels are read, so that their classes are the reason of the refusal."""
    (tmp_path / "data").mkdir()
    for name in ("cat", "dog"):
        Image.new("RGB", (32, 32)).save(tmp_path / "data" / f"{name}.png")
    (tmp_path / "labels.csv").write_text("file,label\ncat.png,cat\ndog.png,dog\n")
    line = (
        f"study mine={tiny_vit} --data {tmp_path / 'data'} --labels {tmp_path / 'labels.csv'} "
        f"--device cpu --quiet --out {tmp_path / 'out'}"
    )
    assert "only in the data: 'cat', 'dog'" in refusal(capsys, line)


def test_how_long_the_rest_takes_is_said_before_and_after_every_chapter(
    tiny_vit, tmp_path, capsys, monkeypatch
):
    # chapters that are kept take no time
    monkeypatch.setenv("VITLENS_CACHE", str(tmp_path / "cache"))
    with few_chapters(*LONG):
        line = f"{LINE.format(models=f'mine={tiny_vit}')} --device cpu --out {tmp_path / 'out'}"
        assert run(line.split()) == 0
    said = [text for text in capsys.readouterr().err.splitlines() if text.startswith("study: ")]
    chapters = len(read_folder(tmp_path / "out").chapters)
    assert len(said) == chapters + 1
    assert [f"{done} of {chapters}" in text for done, text in enumerate(said)] == [
        False,
        *[True] * chapters,
    ]
    assert [" left" in text for text in said] == [*[True] * chapters, False]


def test_of_two_models_of_one_preset_only_that_without_weights_is_trained(tmp_path):
    with few_chapters(*LONG, *[name.removesuffix("-mine") for name in INSPECTED], "evaluate"):
        models = "mine=vit-mini@random other=vit-mini"
        record = ran(tmp_path / "out", f"{LINE.format(models=models)} --epochs 1")
    assert values_of(record.of("train"), "row.alias") == ["other"]

"""The cache of chapters: the same models, images, options and code give the same chapter; anything else runs anew."""

import json
from dataclasses import replace

import pytest

from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.run import chapter_runs as caching
from vitlens.commands.run.chapter_runs import ChapterCache, ChapterRunner, files_digest
from vitlens.commands.run.options import RunOptions

RUN = RunOptions(device="cpu", limit=10, batch_size=10, quiet=True)


@pytest.fixture
def run(tiny_vit, tmp_path):
    """Evaluate the tiny ViT as a chapter of a folder; returns whether the chapter came from the cache."""
    name = f"mine={tiny_vit}"

    def chapter(folder, *, digest="weights", data="digits", **changes):
        cache = ChapterCache(tmp_path / "cache", {name: digest}, data)
        runner = ChapterRunner(tmp_path / folder, replace(RUN, **changes), cache)
        return runner.run("evaluate", "", EvaluateOptions((name,), "digits", run=runner.run_options))

    return chapter


def test_a_chapter_is_copied_and_names_its_new_folder(run, tmp_path):
    assert not run("first").cached
    assert run("second").cached
    results = [
        json.loads((tmp_path / name / "chapters/evaluate/results.json").read_text()) for name in ("first", "second")
    ]
    assert results[0] == results[1]
    written = (tmp_path / "second/chapters/evaluate/config.json").read_text()
    assert str(tmp_path / "second") in written
    assert str(tmp_path / "first") not in written


@pytest.mark.parametrize(
    "changes", [{"digest": "other weights"}, {"data": "other images"}, {"seed": 1}, {"limit": 9}, {"precision": "fp32"}]
)
def test_anything_that_decides_the_numbers_runs_anew(run, changes):
    run("first")
    assert not run("second", **changes).cached


def test_other_code_runs_anew(run, monkeypatch):
    run("first")
    monkeypatch.setattr(caching, "code_digest", lambda: "other")
    assert not run("second").cached


def test_an_unfinished_or_damaged_chapter_is_not_taken(run, tmp_path):
    run("first")
    (kept,) = (tmp_path / "cache" / "chapters").iterdir()
    text = (kept / "results.json").read_text()
    (kept / "results.json").write_text(text.replace('"done"', '"running"'))
    assert not run("second").cached
    (kept / "results.json").write_text("{")
    assert not run("third").cached


def test_the_chapters_used_longest_ago_are_dropped(run, tmp_path, monkeypatch):
    run("first")
    monkeypatch.setattr(caching, "MOST", 1)
    run("second", seed=1)
    assert list((tmp_path / "cache" / "chapters").iterdir()) == []
    assert not run("third").cached


def test_files_are_known_by_name_size_and_time(tmp_path):
    (tmp_path / "a.png").write_bytes(b"1")
    before = files_digest([tmp_path])
    assert files_digest([tmp_path]) == before
    (tmp_path / "a.png").write_bytes(b"22")
    assert files_digest([tmp_path]) != before

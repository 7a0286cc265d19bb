"""commands/run/chapter_runs.py: a chapter is found again by what decides its contents, and by nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from vitlens.commands.run.chapter_runs import ChapterCache
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.stats.options import StatsOptions
from vitlens.files import read_run

NAME = "mine=runs/a"
OPTIONS = StatsOptions((NAME,), data="digits", run=RunOptions(limit=4, command="vitlens stats"))


def cache(root: Path, name: str = NAME, digest: str = "weights", data: str = "digits") -> ChapterCache:
    return ChapterCache(root / "cache", {name: digest}, data)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A finished chapter that was kept, whose config names the folder of its run."""
    place = tmp_path / "first" / "chapters" / "stats-mine"
    with RunFolder.create("stats", out=place, config={"command_line": str(tmp_path / "first")}) as folder:
        folder.finish()
    cache(tmp_path).keep("stats", OPTIONS, place)
    return tmp_path


def test_the_same_chapter_is_restored_under_the_folder_of_its_new_run(kept):
    place = kept / "second" / "chapters" / "stats-mine"
    assert cache(kept).restore("stats", OPTIONS, place)
    assert read_run(place).config["command_line"] == str(kept / "second")


def test_only_where_a_model_lies_does_not_matter(kept):
    moved = "mine=elsewhere/b"
    options = replace(OPTIONS, models=(moved,))
    assert cache(kept, name=moved).restore("stats", options, kept / "x" / "chapters" / "y")


@pytest.mark.parametrize(
    ("changed", "word", "options"),
    [
        ({"digest": "other weights"}, "stats", OPTIONS),
        ({"data": "other images"}, "stats", OPTIONS),
        ({}, "attention", OPTIONS),
        ({}, "stats", replace(OPTIONS, run=replace(OPTIONS.run, limit=5))),
        ({}, "stats", replace(OPTIONS, renormalise=False)),
        # its metrics and arrays are named by the alias
        ({"name": "other=runs/a"}, "stats", replace(OPTIONS, models=("other=runs/a",))),
    ],
    ids=["weights", "images", "command", "limit", "option", "alias"],
)
def test_what_changes_its_contents_makes_another_chapter(kept, changed, word, options):
    assert not cache(kept, **changed).restore(word, options, kept / "x" / "chapters" / "y")


def test_an_unfinished_chapter_is_not_restored(tmp_path):
    place = tmp_path / "first" / "chapters" / "stats-mine"
    RunFolder.create("stats", out=place)
    cache(tmp_path).keep("stats", OPTIONS, place)
    assert not cache(tmp_path).restore("stats", OPTIONS, tmp_path / "x" / "chapters" / "y")

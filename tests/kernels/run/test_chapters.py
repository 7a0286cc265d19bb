"""A chapter is found again by what decides its contents, and by nothing else; golden/test_audit takes one."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from vitlens.commands.run import chapter_runs
from vitlens.commands.run.chapter_runs import ChapterCache, files_digest
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.stats.options import StatsOptions
from vitlens.record import read_run

NAME = "mine=runs/a"
OPTIONS = StatsOptions(NAME, data="digits", run=RunOptions(limit=4, command="vitlens stats"))


def cache(root: Path, name: str = NAME, digest: str = "weights", data: str = "digits") -> ChapterCache:
    return ChapterCache(root / "cache", {name: digest}, data)


def keep(root: Path, options: StatsOptions = OPTIONS, *, finished: bool = True) -> None:
    """Keep a chapter whose config names the folder of its run."""
    place = root / "first" / "chapters" / "stats-mine"
    folder = RunFolder.opened("stats", RunOptions(out=place, overwrite=True), {"command_line": str(root / "first")})
    if finished:
        with folder:
            folder.stop()
    cache(root).keep("stats", options, place)


def found(root: Path, options: StatsOptions = OPTIONS, word: str = "stats", **other: str) -> bool:
    return cache(root, **other).restore(word, options, root / "second" / "chapters" / "stats-mine")


def with_run(**changes: object) -> StatsOptions:
    return replace(OPTIONS, run=replace(OPTIONS.run, **changes))


def test_the_same_chapter_is_restored_under_the_folder_of_its_new_run(tmp_path):
    keep(tmp_path)
    assert found(tmp_path)
    restored = tmp_path / "second" / "chapters" / "stats-mine"
    assert str(tmp_path / "first") not in (restored / "config.json").read_text()
    assert read_run(restored).config["command_line"] == str(tmp_path / "second")
    moved = "mine=elsewhere/b"  # only where a model lies does not matter
    assert found(tmp_path, replace(OPTIONS, model=moved), name=moved)


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "other weights"},
        {"data": "other images"},
        {"word": "attention"},
        *({"options": with_run(**one)} for one in ({"limit": 5}, {"seed": 1}, {"precision": "fp32"})),
        {"options": replace(OPTIONS, renormalise=False)},
        # its metrics and arrays are named by the alias
        {"name": "other=runs/a", "options": replace(OPTIONS, model="other=runs/a")},
    ],
    ids=str,
)
def test_what_changes_its_contents_makes_another_chapter(tmp_path, changes):
    keep(tmp_path)
    assert not found(tmp_path, **changes)


def test_an_unfinished_or_damaged_chapter_or_one_of_other_code_or_one_too_many_is_not_taken(tmp_path, monkeypatch):
    keep(tmp_path, finished=False)
    assert not found(tmp_path)
    keep(tmp_path)
    (kept,) = (tmp_path / "cache" / "chapters").iterdir()
    text = (kept / "results.json").read_text()
    for damaged in (text.replace('"done"', '"running"'), "{"):
        (kept / "results.json").write_text(damaged)
        assert not found(tmp_path)
    keep(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(chapter_runs, "code_digest", lambda: "other")
        assert not found(tmp_path)
    monkeypatch.setattr(chapter_runs, "MOST", 1)  # bytes of the cache, so that all are dropped
    keep(tmp_path, with_run(seed=1))
    assert not list((tmp_path / "cache" / "chapters").iterdir())


def test_files_are_known_by_name_size_and_time(tmp_path):
    digests = {files_digest([tmp_path])}
    for name, content, time in (("a", b"1", 1), ("a", b"22", 1), ("a", b"22", 2), ("b", b"22", 2)):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (time, time))
        assert files_digest([tmp_path]) not in digests
        digests.add(files_digest([tmp_path]))

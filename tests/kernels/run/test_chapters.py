"""A chapter is found again by what decides its contents, and by nothing else."""

import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kit.commands import digest_of_code
from tests.kit.select import values_of
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run import chapter_runs
from vitlens.commands.run.chapter_runs import (
    ChapterCache,
    ChapterImages,
    ChapterRunner,
    files_digest,
)
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.stats.record import StatsRecord
from vitlens.devices import resolve_device
from vitlens.record import read_run

NAME = "mine=runs/a"
OPTIONS = StatsOptions(NAME, data="digits", run=RunOptions(limit=4, command="vitlens stats"))


def cache(
    root: Path, name: str = NAME, digest: str = "weights", data: str = "digits"
) -> ChapterCache:
    return ChapterCache(root / "cache", {name: digest}, data)


def keep(
    root: Path, options: StatsOptions = OPTIONS, *, finished: bool = True, title: str = ""
) -> None:
    """Keep a chapter whose config names the folder of its run."""
    place = root / "first" / "chapters" / "stats-mine"
    run = replace(options.run, out=place, overwrite=True)
    config = {
        "command_line": "vitlens stats mine=runs/a",
        "options": asdict(replace(options, run=run)),
        "models": [{"alias": "mine", "name": "runs/a"}],
    }
    folder = RunFolder.opened("stats", run, config, title=title)
    if finished:
        with folder:
            folder.keep(StatsRecord())
            folder.stop()
    cache(root).keep("stats", options, place)


def found(root: Path, options: StatsOptions = OPTIONS, word: str = "stats", **other: str) -> bool:
    place = root / "second" / "chapters" / "stats-mine"
    return cache(root, **other).restore(
        word, replace(options, run=replace(options.run, out=place)), place
    )


def with_run(**changes: object) -> StatsOptions:
    return replace(OPTIONS, run=replace(OPTIONS.run, **changes))


def test_the_same_chapter_is_restored_under_the_folder_of_its_new_run(tmp_path):
    keep(tmp_path)
    assert found(tmp_path)
    restored = tmp_path / "second" / "chapters" / "stats-mine"
    assert not [
        path for path in restored.rglob("*.*") if str(tmp_path / "first") in path.read_text()
    ]
    moved = "mine=elsewhere/b"  # only where a model lies does not matter
    line = "vitlens stats mine=elsewhere/b"
    assert found(tmp_path, replace(with_run(command=line), model=moved), name=moved)
    config = read_run(restored).config
    assert (config["command_line"], config["options"]["run"]["out"]) == (line, str(restored))
    assert (config["options"]["model"], config["models"][0]["name"]) == (moved, "elsewhere/b")
    assert "elsewhere/b" in (restored / "report.md").read_text()


@pytest.mark.parametrize("name", ["r", "digits", "test", "a+(b)[c]", "é", "chapters", "stats-mine"])
def test_a_folder_whose_name_is_in_the_texts_of_a_chapter_changes_none_of_them(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    title = f"Stats of {name}/chapters/stats-mine tested on {name}"
    keep(Path(), with_run(data_dir=Path(name)), title=title)
    Path("first").rename(name)
    assert found(Path(), with_run(data_dir=Path(name)))
    restored = Path("second", "chapters", "stats-mine")
    config = read_run(restored).config
    assert (config["title"], config["options"]["run"]["data_dir"]) == (title, name)
    assert config["options"]["run"]["out"] == str(restored)


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "other weights"},
        {"data": "other images"},
        {"word": "attention"},
        *(
            {"options": with_run(**one)}
            for one in ({"limit": 5}, {"seed": 1}, {"precision": "fp32"})
        ),
        *(
            {"options": with_run(**one)}
            for one in ({"batch_size": 2}, {"data_dir": Path("elsewhere")})
        ),
        {"options": replace(OPTIONS, renormalise=False)},
        # its metrics and arrays are named by the alias
        {"name": "other=runs/a", "options": replace(OPTIONS, model="other=runs/a")},
    ],
    ids=str,
)
def test_what_changes_its_contents_makes_another_chapter(tmp_path, changes):
    keep(tmp_path)
    assert not found(tmp_path, **changes)


def test_an_unfinished_or_damaged_chapter_or_one_of_other_code_or_one_too_many_is_not_taken(
    tmp_path, monkeypatch
):
    keep(tmp_path, finished=False)
    assert not found(tmp_path)
    keep(tmp_path)
    (folder,) = (tmp_path / "cache" / "chapters").iterdir()
    text = (folder / "results.json").read_text()
    for damaged in (text.replace('"done"', '"running"'), "{"):
        (folder / "results.json").write_text(damaged)
        assert not found(tmp_path)
    keep(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(chapter_runs, "code_digest", lambda: "other")
        assert not found(tmp_path)
    monkeypatch.setattr(chapter_runs, "MOST", 1)  # bytes of the cache, so that all are dropped
    keep(tmp_path, with_run(seed=1))
    assert not list((tmp_path / "cache" / "chapters").iterdir())


def test_the_device_and_the_number_of_threads_and_the_libraries_are_part_of_it(
    tmp_path, monkeypatch
):
    keep(tmp_path, with_run(device="auto"))
    assert found(tmp_path, with_run(device=str(resolve_device("auto"))))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 99)
        assert not found(tmp_path)
    for changed in (["transformers 99.0"], []):
        with monkeypatch.context() as patch:
            patch.setattr(chapter_runs, "libraries", lambda changed=changed: tuple(changed))
            assert not found(tmp_path)
    assert found(tmp_path)


def test_a_chapter_is_restored_whole_or_not_at_all_while_another_process_keeps_it(tmp_path):
    keep(tmp_path)
    place = tmp_path / "first" / "chapters" / "stats-mine"
    for number in range(30):
        (place / f"{number}.txt").write_text("x")
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as other:
        saving = other.submit(keep_often, tmp_path, place, 20)
        while not saving.done():
            target = tmp_path / "second" / "chapters" / "stats-mine"
            options = with_run(out=target)
            if cache(tmp_path).restore("stats", options, target):
                assert len(list(target.glob("*.txt"))) in (0, 30)
        assert saving.result() is None
    assert found(tmp_path)
    assert not list((tmp_path / "cache").rglob(".*-*"))


def keep_often(root: Path, place: Path, times: int) -> None:
    for _ in range(times):
        cache(root).keep("stats", OPTIONS, place)


def test_images_behind_links_are_seen_and_a_loop_of_links_ends(tmp_path):
    store = tmp_path / "store"
    data = tmp_path / "data"
    (store / "cat").mkdir(parents=True)
    data.mkdir()
    (store / "cat" / "1.png").write_bytes(b"1")
    (data / "cat").symlink_to(store / "cat")
    (store / "cat" / "loop").symlink_to(data)
    digests = [files_digest([data])]
    (store / "cat" / "1.png").write_bytes(b"22")
    digests.append(files_digest([data]))
    (store / "cat" / "deep").mkdir()
    (store / "cat" / "deep" / "2.png").write_bytes(b"3")
    digests.append(files_digest([data]))
    (tmp_path / "other").mkdir()
    shutil.copy2(store / "cat" / "1.png", tmp_path / "other")
    (data / "cat").unlink()
    (data / "cat").symlink_to(tmp_path / "other")
    digests.append(files_digest([data]))
    assert len(set(digests)) == 4


@pytest.mark.parametrize("data", ["pneumoniamnist", "medmnist:pneumoniamnist"])
def test_a_set_in_the_data_folder_is_known_by_its_file(tmp_path, data):
    file = tmp_path / "pneumoniamnist.npz"
    file.write_bytes(b"1")
    before = ChapterImages(data, data_dir=tmp_path).digest
    assert ChapterImages(data, data_dir=tmp_path).digest == before
    file.write_bytes(b"22")
    assert ChapterImages(data, data_dir=tmp_path).digest != before


def test_a_downloaded_set_is_known_by_the_files_of_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("vitlens.data.torchvision_sets.download", lambda *_: None)
    before = ChapterImages("cifar10", data_dir=tmp_path).digest
    (tmp_path / "batch").write_bytes(b"1")
    assert ChapterImages("cifar10", data_dir=tmp_path).digest != before
    assert ChapterImages("digits", data_dir=tmp_path).digest == ChapterImages("digits").digest


def test_what_a_model_file_imports_and_reads_changes_the_models_digest(tmp_path, monkeypatch):
    digests = []
    for number, (scale, text) in enumerate(
        [("1.0", "0"), ("2.0", "0"), ("2.0", "7"), ("2.0", "7")]
    ):
        folder = tmp_path / str(number)
        (folder / "helper").mkdir(parents=True)
        (folder / "mine.py").write_text(MODEL_FILE)
        (folder / "helper" / "__init__.py").write_text(f"SCALE = {scale}")
        (folder / "offset.txt").write_text(text)
        name = f"{folder}/mine.py:build"
        for _ in range(2):  # loaded again, it is not imported again
            digests.append(digest_of_code(name))
        monkeypatch.delitem(sys.modules, "helper")
    assert [digests[index] == digests[index + 1] for index in (0, 2, 4, 6)] == [True] * 4
    assert len(set(digests)) == 3
    assert digests[4] == digests[6]


MODEL_FILE = """
from pathlib import Path
import torch, vitlens
from torch import nn
from helper import SCALE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.offset = float((Path(__file__).parent / "offset.txt").read_text())

    def forward(self, images):
        return self.head(self.conv(images).relu().mean((2, 3))) * SCALE + self.offset

def build():
    torch.manual_seed(0)
    return vitlens.wrap(Net(), image_size=16, mean=(0.5,) * 3, std=(0.5,) * 3)
"""


@pytest.mark.parametrize(("word", "is_cached"), [("profile", False), ("stats", True)])
def test_timings_are_never_those_of_another_run(tmp_path, monkeypatch, word, is_cached):
    def measure(options: StatsOptions) -> None:
        config = {"options": {}, "models": [{"alias": "mine", "name": "runs/a"}]}
        with RunFolder.opened(word, options.run, config) as folder:
            folder.keep(plain.record_class({})())

    plain = COMMANDS[word]
    replaced = SimpleNamespace(
        measure=measure, record_class=plain.record_class, report=plain.report, reports=True
    )
    monkeypatch.setitem(COMMANDS, word, replaced)
    rows = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        runner = ChapterRunner(tmp_path / name, RunOptions(), cache(tmp_path))
        rows.append(runner.run(word, "mine", OPTIONS))
    assert values_of(rows, "cached") == [False, is_cached]


def test_a_chapter_of_other_labels_is_not_restored(tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("a.png,cat\n")
    options = with_run(labels=table)
    keep(tmp_path, options)
    assert found(tmp_path, options)
    table.write_text("a.png,dog, or cat\n")
    assert not found(tmp_path, options)


def test_files_are_known_by_name_size_and_time(tmp_path):
    digests = {files_digest([tmp_path])}
    for name, content, time in (("a", b"1", 1), ("a", b"22", 1), ("a", b"22", 2), ("b", b"22", 2)):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (time, time))
        assert files_digest([tmp_path]) not in digests
        digests.add(files_digest([tmp_path]))

"""Turns, uploads, exports, errors and options of the page, without gradio."""

import threading
import time
from dataclasses import replace
from functools import partial
from importlib import metadata
from io import BytesIO
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.forms import picture_of
from vitlens.cli.main import run
from vitlens.commands.run.deadline import TooLongError, deadline, require_time
from vitlens.commands.run.progress import progress
from vitlens.commands.run.publish import report
from vitlens.data.decode import quiet_pillow
from vitlens.demo import measure
from vitlens.demo.pictures import UPLOAD_BYTES, read_upload
from vitlens.demo.pool import BusyError, OutdatedError, Pool
from vitlens.demo.site import (
    DemoSite,
    Newest,
    Result,
    TabPlace,
    TabRequest,
    forget,
    message_for_visitors,
    token_of,
    write_page,
)
from vitlens.demo.tabs import write_look
from vitlens.errors import DataError, UnknownNameError

REPORTS = Path(__file__).parents[3] / "reports"
VIT = vitlens.load("vit-digits")
CNN = vitlens.load("cnn-digits")


def test_requests_are_answered_one_at_a_time_in_the_order_in_which_they_came():
    pool = Pool((VIT,))
    inside = []
    most = []
    served = []

    def ask(number: int) -> None:
        with pool.turn("vit-digits"):
            inside.append(1)
            most.append(len(inside))
            served.append(number)
            time.sleep(0.01)
            inside.pop()

    with pool.turn("vit-digits"):
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert most == [1] * 5
    assert served == [0, 1, 2, 3, 4]


def test_a_request_waits_for_a_limited_time_and_a_failed_one_lets_the_next_in():
    pool = Pool((VIT,), waiting=0.05)
    with (
        pool.turn("vit-digits"),
        pytest.raises(BusyError, match="try again"),
        pool.turn("vit-digits"),
    ):
        pass
    with pytest.raises(RuntimeError, match="broken"), pool.turn("vit-digits"):
        raise RuntimeError("broken")
    with (
        pool.turn("vit-digits"),
        pytest.raises(UnknownNameError, match="another"),
        pool.turn("another"),
    ):
        pass


@pytest.mark.parametrize("model", [VIT, CNN], ids=lambda model: model.alias)
def test_a_request_that_computes_too_long_is_stopped_and_leaves_the_model_as_it_was(
    model, tmp_path
):
    pool = Pool((VIT, CNN))
    picture = picture_of((VIT, CNN))
    images = picture.images(model)
    before = vitlens.explain(model, images, method="saliency")
    with pytest.raises(TooLongError), replace(pool, running=0.0).turn(model.alias):
        vitlens.explain(model, images, method="saliency")
    slow = model.module.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    with pytest.raises(TooLongError), replace(pool, running=0.2).turn(model.alias):
        vitlens.attack(model, images, "predicted", method="pgd", epsilon=1 / 255, steps=40)
    slow.remove()
    with pool.turn(model.alias) as served:  # the next visitor
        assert torch.equal(vitlens.explain(served, images, method="saliency"), before)
    for module in model.modules():
        assert not module._forward_pre_hooks
    assert not model.training
    short = replace(pool, running=0.0)
    # and of its report nothing is left
    with (
        pytest.raises(TooLongError),
        short.turn(model.alias) as served,
    ):
        write_page(
            DemoSite(short, (), tmp_path), served, picture, write_look, session="one", word="look"
        )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_deadline_holds_inside_alone_and_each_step_checks_it():
    require_time()
    with deadline(60.0):
        with pytest.raises(TooLongError), deadline(0.0):
            require_time()
        require_time()
        with (
            deadline(0.0),
            progress("steps", 2, quiet=True) as advance,
            pytest.raises(TooLongError),
        ):
            advance(1)
    require_time()


def test_a_report_that_takes_too_long_is_no_fault_of_the_folder(tmp_path):
    folder = copytree(REPORTS / "profile-vit-resnet-swin", tmp_path / "run")
    with pytest.raises(TooLongError), deadline(0.0):
        report(folder)


def test_an_answer_that_a_newer_request_replaces_is_not_computed():
    pool = Pool((VIT,))
    newest = Newest()
    first = newest.register_click("Break")
    second = newest.register_click("Break")
    other = newest.register_click("Explain")
    with pytest.raises(OutdatedError), pool.turn("vit-digits", is_current=first):
        pass
    for still_wanted in (second, other):
        with pool.turn("vit-digits", is_current=still_wanted):
            pass
    # a click replaces no picture that its tab is still to show
    before = newest.register_click("Intervene")
    picture = newest.register_picture("Intervene")
    after = newest.register_click("Intervene")
    assert [before(), picture(), after()] == [False, True, True]
    another = newest.register_picture("Intervene")
    assert [picture(), after(), another()] == [False, False, True]


def uploaded(file: Path, *models):
    with quiet_pillow():
        return read_upload(file, models)


def test_an_upload_is_read_for_every_model_and_deleted(tmp_path):
    file = tmp_path / "up.gif"
    frames = [Image.fromarray(np.full((50, 40, 3), value, np.uint8)) for value in (200, 0)]
    frames[0].save(file, save_all=True, append_images=frames[1:])
    picture = uploaded(file, VIT, CNN)
    assert not file.exists()
    assert picture.name == "up.gif"
    assert "more than one frame" in picture.note
    shapes = {alias: tuple(pixels.shape) for alias, pixels in picture.pixels.items()}
    assert shapes == dict.fromkeys(("vit-digits", "cnn-digits"), (1, 3, 32, 32))
    assert picture.images(VIT).max() == pytest.approx(200 / 255)
    assert len(picture.split(VIT)) == 1


def test_a_bad_upload_is_one_line_and_deleted_too(tmp_path):
    large = BytesIO()
    Image.new("1", (9000, 8000)).save(large, "PNG")
    file = tmp_path / "up.png"
    for content, words in (
        (b"", "expected an image"),
        (b"no image", "expected an image"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "cannot read up.png"),
        (bytes(UPLOAD_BYTES + 1), "at most 20 MB"),
        (large.getvalue(), "at most 64 megapixels"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=words) as caught:
            uploaded(file, VIT)
        assert not file.exists()
        assert "\n" not in message_for_visitors(caught.value)


def test_a_sessions_reports_are_forgotten_and_of_many_the_latest_are_kept(tmp_path):
    site = DemoSite(Pool((VIT,)), (), tmp_path / "reports")
    cache = tmp_path / "cache"
    picture = picture_of((VIT,))

    def write(job, error: Exception | None = None):
        job.run.out.mkdir()
        if error is not None:
            raise error
        (job.run.out / "report.html").write_text("a")

    def made(session: str) -> Path:
        page = write_page(site, VIT, picture, write, session=session, word="look")
        assert page.is_file()
        assert page.with_suffix(".zip").is_file()
        (cache / "hash").mkdir(parents=True, exist_ok=True)
        (cache / "hash" / page.name).write_text("a")
        return page

    pages = [made("one") for _ in range(40)]
    assert 1 < sum(page.is_file() for page in pages) < 30
    assert pages[-1].is_file()
    other = made("two")
    with pytest.raises(RuntimeError, match="broken"):
        write_page(
            site,
            VIT,
            picture,
            partial(write, error=RuntimeError("broken")),
            session="two",
            word="explain",
        )
    forget(site.place, cache, "one")
    left = {f"vitlens-look-{token_of('two')}.{form}" for form in ("html", "zip")}
    assert {path.name for path in site.place.rglob("*.*")} == left
    assert [path.name for path in cache.rglob("*.html")] == [other.name]


def test_a_tab_that_closes_while_its_page_is_computed_is_no_error(tmp_path):
    picture = picture_of([VIT])
    site = DemoSite(Pool((VIT,)), (picture,), tmp_path / "reports")
    here = TabPlace(site, None, None, None, "Look")
    request = TabRequest(picture, "vit-digits", lambda: True, session="closed")

    def write_then_close(job):
        page = write_look(job)
        forget(site.place, tmp_path / "cache", "closed")
        return page

    with pytest.raises(OutdatedError):
        here.report(request, Result(None, None, None), write_then_close)

    def fail(_job):
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):  # in an open tab
        here.report(request, Result(None, None, None), fail)


def test_an_error_is_one_line_and_an_unexpected_one_tells_no_path():
    assert message_for_visitors(DataError("expected a\n  picture")) == "expected a picture"
    assert "/secret" not in message_for_visitors(ValueError("/secret/path"))
    assert "memory" in message_for_visitors(MemoryError())


@pytest.mark.parametrize("version", [None, "5.9.0"])
def test_without_the_extra_one_line_says_what_to_type(version, monkeypatch, capsys):
    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(measure, "version", found)
    assert run(["demo", "vit-digits", "--no-browser"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.endswith("type pip install 'vitlens[demo]'")

"""Report: what a tab shows, written by the command that measures it, as a report folder and as one HTML file."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from vitlens.commands.run.options import RunOptions
from vitlens.demo.markup import joined, said, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.site import Asked, Export, Here, TabParts, Updates
from vitlens.errors import DataError, UnknownNameError
from vitlens.files import read_run
from vitlens.models.model import Model
from vitlens.report.prose import listed, say

_ABOUT: Final = (
    "What the chosen tab shows of this picture, with its settings, as a report: a folder (report.md, figures, "
    "results.json, arrays) as an archive, and report.html, one file to send on. Look, Explain and Break give the "
    "report of the command of the same name (Break: vitlens attack)."
)


@dataclass(frozen=True)
class Exported:
    """The files: the report folder as an archive, and the page; command: what to type for the same."""

    archive: Path
    page: Path
    command: str


def exported(export: Export, models: tuple[Model, ...], picture: Picture, place: Path, *, name: str) -> Exported:
    """Write a report below `place`, which is there already; name: of the files. Raises what the command raises."""
    folder, alone = place / name, place / f"{name}.html"
    page = export.write(models, picture, RunOptions(out=folder, html=True, quiet=True))
    assert page is not None  # there is one process
    shutil.copyfile(page, alone)
    line = str(read_run(folder).config["command_line"])
    archive = Path(shutil.make_archive(str(folder), "zip", place, name))
    shutil.rmtree(folder)
    return Exported(archive, alone, line)


def token_of(session: str) -> str:
    """A session's part in the names of its files; the session cannot be told from it."""
    return sha256(session.encode()).hexdigest()[:12]


@contextmanager
def place_of(root: Path, session: str, word: str) -> Iterator[tuple[Path, str]]:
    """A folder for a session's report of a tab, and the name of its files; an earlier one is deleted, and what an error
    leaves behind, too."""
    place = root / token_of(session) / word
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        yield place, f"vitlens-{word}-{token_of(session)}"
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def forget(root: Path, cache: Path, session: str) -> None:
    """Delete a session's reports, and the copies of them from which a browser downloads."""
    token = token_of(session)
    shutil.rmtree(root / token, ignore_errors=True)
    for copy in cache.glob(f"*/vitlens-*-{token}.*"):
        copy.unlink(missing_ok=True)


def report_tab(here: Here, tabs: Sequence[TabParts]) -> TabParts:
    """What one of the other tabs shows, as a report folder and as one HTML file."""
    import gradio

    names = [tab.name for tab in tabs]
    what = gradio.Radio(names, value=names[0], label="Report of what this tab shows", elem_id="report-what")
    gradio.HTML(joined(sentence(_ABOUT, "quiet")))
    write = gradio.Button("Write the report", variant="primary", elem_id="report-write")
    words = gradio.HTML(elem_id="report-words")
    with gradio.Row():
        archive = gradio.DownloadButton("Report folder (zip)", visible=False, elem_id="report-archive")
        page = gradio.DownloadButton("One HTML file", visible=False, elem_id="report-page")
    outputs = (words, archive, page)
    states = [tab.shows for tab in tabs if tab.shows is not None]

    def refresh(now: Asked) -> Updates:
        hidden = gradio.DownloadButton(visible=False)
        nothing = say("Nothing written yet for {{ alias }} and this picture.", alias=now.alias)
        return dict(zip(outputs, (joined(said(nothing)), hidden, hidden)))

    def clicked(now: Asked, drawn: Mapping[str, tuple[str, str]], chosen: str, *values: Any) -> Updates:
        if chosen not in names:
            raise UnknownNameError("tab with a report", str(chosen), names)
        if drawn.get(chosen) != (now.picture.key, now.alias):
            raise DataError(
                f"expected {chosen} to show this picture and {now.alias}, found it not opened since; open {chosen} "
                "first"
            )
        tab, seen = tabs[names.index(chosen)], iter(values)
        shows = {each.name: next(seen) for each in tabs if each.shows is not None}
        assert tab.export is not None
        export = tab.export(now.alias, shows.get(chosen))
        with (
            here.turn(now, *export.aliases) as models,
            place_of(here.site.place, now.session, tab.word) as (place, name),
        ):
            files = exported(export, models, now.picture, place, name=name)
        how = "The same page from a terminal" if " demo " in files.command else "The same from a terminal"
        of = listed([say("{{ alias }}", alias=each) for each in dict.fromkeys(export.aliases)])
        return {
            words: joined(
                said(say("Written: the report of {{ tab }} for {{ of }}.", tab=chosen, of=of)),
                Markup("<p class='vl-say'>{}: <code>{}</code></p>").format(how, files.command),
            ),
            archive: gradio.DownloadButton(value=str(files.archive), visible=True),
            page: gradio.DownloadButton(value=str(files.page), visible=True),
        }

    here.on(write.click, clicked, (here.drawn, what, *states), outputs)
    return TabParts(here.tab, (), outputs, refresh)

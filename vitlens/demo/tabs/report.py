"""The tab Report."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gradio
from markupsafe import Markup

from vitlens.demo.exports import place_of
from vitlens.demo.markup import joined, said
from vitlens.demo.pictures import Picture
from vitlens.demo.site import Asked, Component, DemoSite, Newest, NowShown, TabParts, Updates, asked
from vitlens.demo.telling import told
from vitlens.demo.views.export import WORDS, Wanted, exported
from vitlens.errors import DataError

_ABOUT = (
    "What the chosen tab shows of this picture, with its settings, as a report: a folder (report.md, figures, "
    "results.json, arrays) as an archive, and report.html, one file to send on. Look, Explain and Break give the "
    "report of the command of the same name (Break: vitlens attack)."
)
_NAME = "Report"
_READ = (("Explain", "sides"), ("Break", "done"), ("Intervene", "off"), ("3D", "done"))  # what these tabs show
Controls = Mapping[str, Mapping[str, Component]]


def _wanted(tab: str, alias: str, seen: Mapping[str, Any]) -> tuple[tuple[str, ...], Callable[..., Wanted]]:
    """The models of a tab's report by their aliases, and what the report is of, but for the models themselves."""
    wanted = partial(Wanted, WORDS[tab])
    if tab == "Explain":
        (*_, target), kept = seen[tab]
        shown = [side for side in kept if not side.lacks]  # a report is of one class
        methods = tuple(side.method for side in shown)
        return tuple(side.alias for side in shown), partial(wanted, methods=methods, target=target)
    if tab == "Break":
        return (alias,), partial(wanted, attack=seen[tab][0], epsilon=seen[tab][1])
    if tab == "Intervene":
        return (alias,), partial(wanted, off=seen[tab])
    if tab == "3D":
        return (alias,), partial(wanted, share=seen[tab][0])
    return (alias,), wanted


def report_tab(site: DemoSite, shown: NowShown, controls: Controls) -> TabParts:
    """What is shown, as a report folder and as one HTML file. controls: of the other tabs, by their names."""
    what = gradio.Radio(list(WORDS), value="Look", label="Report of what this tab shows", elem_id="report-what")
    gradio.HTML(joined(Markup("<p class='vl-say quiet'>{}</p>").format(_ABOUT)))
    write = gradio.Button("Write the report", variant="primary", elem_id="report-write")
    words = gradio.HTML(elem_id="report-words")
    with gradio.Row():
        archive = gradio.DownloadButton("Report folder (zip)", visible=False, elem_id="report-archive")
        page = gradio.DownloadButton("One HTML file", visible=False, elem_id="report-page")
    outputs = (words, archive, page)

    def refresh(now: Asked) -> Updates:
        hidden = gradio.DownloadButton(visible=False)
        return {
            words: joined(said(f"Nothing written yet for {now.alias} and this picture.")),
            archive: hidden,
            page: hidden,
        }

    def written(now: Asked, tab: str, seen: Mapping[str, Any], session: str) -> Updates:
        sides, wanted = _wanted(tab, now.alias, seen)
        with (
            site.pool.turn(*sides, wanted=now.wanted) as models,
            place_of(site.place, session, WORDS[tab]) as (place, name),
        ):
            files = exported(now.picture, wanted(models), place, name=name)
        how = "The same page from a terminal" if tab in ("Intervene", "3D") else "The same from a terminal"
        line = Markup("<p class='vl-say'>{}: <code>{}</code></p>").format(how, files.command)
        return {
            words: joined(said(f"Written: the report of {tab} for {' and '.join(dict.fromkeys(sides))}."), line),
            archive: _offered(files.archive),
            page: _offered(files.page),
        }

    @told
    def clicked(
        picture: Picture | None,
        alias: str,
        newest: Newest,
        request: gradio.Request,
        drawn: Mapping[str, tuple[str, str]],
        tab: str,
        *values: Any,
    ) -> Updates:
        now = asked(_NAME, picture, alias, newest)
        if drawn.get(tab) != (now.picture.key, alias):
            raise DataError(
                f"expected {tab} to show this picture and {alias}, found it not opened since; open {tab} first"
            )
        seen = dict(zip((name for name, _ in _READ), values, strict=True))
        return written(now, tab, seen, str(request.session_hash))

    given = [*shown.inputs, shown.drawn, what, *(controls[tab][name] for tab, name in _READ)]
    write.click(clicked, given, list(outputs), **site.event)
    return TabParts(_NAME, (), outputs, refresh)


def _offered(path: Path) -> Any:
    return gradio.DownloadButton(value=str(path), visible=True)

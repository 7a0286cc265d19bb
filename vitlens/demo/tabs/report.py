"""The tab Report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio
from markupsafe import Markup

from vitlens.demo.exports import place_of
from vitlens.demo.markup import joined, said
from vitlens.demo.pictures import Picture
from vitlens.demo.site import Component, DemoSite, NowShown, TabParts, Updates, required
from vitlens.demo.telling import told
from vitlens.demo.views.export import WORDS, Wanted, exported

_ABOUT = (
    "The report that the command of the same analysis writes, of this picture and the settings of that tab: a folder "
    "(report.md, figures, results.json, arrays) as an archive, and report.html, one file to send on."
)


Controls = Mapping[str, Component]


def report_tab(site: DemoSite, shown: NowShown, explain: Controls, attack: Controls) -> TabParts:
    """What is shown, as a report folder and as one HTML file. explain, attack: the controls of those tabs."""
    what = gradio.Radio(list(WORDS), value="Look", label="Report of what this tab shows", elem_id="report-what")
    gradio.HTML(joined(Markup("<p class='vl-say quiet'>{}</p>").format(_ABOUT)))
    write = gradio.Button("Write the report", variant="primary", elem_id="report-write")
    words = gradio.HTML(elem_id="report-words")
    with gradio.Row():
        archive = gradio.DownloadButton("Report folder (zip)", visible=False, elem_id="report-archive")
        page = gradio.DownloadButton("One HTML file", visible=False, elem_id="report-page")
    outputs = (words, archive, page)

    def refresh(_: Picture, alias: str) -> Updates:
        hidden = gradio.DownloadButton(visible=False)
        return {
            words: joined(said(f"Nothing written yet for {alias} and this picture.")),
            archive: hidden,
            page: hidden,
        }

    @told
    def written(picture: Picture | None, alias: str, tab: str, values: tuple[Any, ...], session: str) -> Updates:
        own = required(picture)
        left, other, right, target, method, epsilon = values
        sides = (alias, other) if tab == "Explain" else (alias,)
        with site.pool.turn(*sides) as models:
            wanted = Wanted(WORDS[tab], models, (left, right), target, method, float(epsilon))
            with place_of(site.place, session, WORDS[tab]) as (place, name):
                files = exported(own, wanted, place, name=name)
        line = Markup("<p class='vl-say'>The same from a terminal: <code>{}</code></p>").format(files.command)
        return {
            words: joined(said(f"Written: the report of {tab} for {' and '.join(dict.fromkeys(sides))}."), line),
            archive: _offered(files.archive),
            page: _offered(files.page),
        }

    # one parameter a control, as gradio finds the request by its place
    def clicked(
        picture: Picture | None,
        alias: str,
        tab: str,
        left: str,
        other: str,
        right: str,
        target: str,
        method: str,
        epsilon: float,
        request: gradio.Request,
    ) -> Updates:
        values = left, other, right, target, method, epsilon
        return written(picture, alias, tab, values, str(request.session_hash))

    given = [shown.picture, shown.alias, what]
    given += [explain[name] for name in ("left", "other", "right", "target")]
    given += [attack["attack"], attack["epsilon"]]
    write.click(clicked, given, list(outputs), **site.event)
    return TabParts("Report", (), outputs, refresh)


def _offered(path: Path) -> Any:
    return gradio.DownloadButton(value=str(path), visible=True)

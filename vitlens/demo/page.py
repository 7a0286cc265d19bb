"""The page: a picture and a model to choose, and the tabs that show what it does with it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import gradio

from vitlens.charts.overlay import enlarged
from vitlens.data.decode import PIXEL_LIMIT
from vitlens.demo.intervene import intervene_tab
from vitlens.demo.pictures import UPLOAD_BYTES, Picture, embedded, read_upload, require_size
from vitlens.demo.pool import RUNNING, WAITING
from vitlens.demo.site import (
    EVENT,
    Asked,
    Component,
    DemoSite,
    Here,
    Newest,
    Tab,
    Updates,
    forget,
    pieces,
    required,
    told,
)
from vitlens.demo.tabs import PASSES, attack_tab, explain_tab, look_tab
from vitlens.errors import DataError, UnknownNameError
from vitlens.report.html.pictures import MOST, Embedded

KEPT: Final = 1800  # seconds after the last change for which a session's images are kept in memory
_PICK: Final = """element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-example]");
  if (button) trigger("picked", { number: Number(button.dataset.example) });
});"""
_UPLOAD: Final = (Path(__file__).parent / "upload.js").read_text(encoding="utf-8")
# by default gradio drops an event while an earlier one of the same control is under way: a tab
# would stay as it was
_QUICK: Final = {"api_visibility": "private", "show_progress": "hidden", "trigger_mode": "multiple"}
_TABS: Final = {
    "Look": look_tab,
    "Explain": explain_tab,
    "Break": attack_tab,
    "Intervene": intervene_tab,
}
_TITLE: Final = (
    '<div class="vl-head-line"><h1>vitlens demo</h1><p>What a model does with a picture: layers '
    "and heads count from 0 (L3.H7). Each tab runs a command and shows its report. Runs on this "
    "machine alone.</p></div>"
)
_LIMITS: Final = (
    f"Limits: files of at most {UPLOAD_BYTES // 1_000_000} MB and {PIXEL_LIMIT // 1_000_000} "
    "megapixels, the first "
    f"frame of an animation, maps and attacks of at most {PASSES} passes of the model. The page "
    "answers one visitor at "
    f"a time: a request waits for at most {WAITING:.0f} s, and is stopped after {RUNNING:.0f} s of "
    "computing. What you upload is read once and its file deleted at once; the pixels stay in "
    "memory for this session, at most "
    f"{KEPT // 60} minutes after its last change, and its reports until its tab is closed."
)


def build(site: DemoSite, cache: Path) -> Any:
    """Return the page of gradio, not yet served; cache: where gradio keeps files of this page."""
    with gradio.Blocks(
        title="vitlens demo", analytics_enabled=False, fill_width=True, delete_cache=(60, KEPT)
    ) as page:
        gradio.HTML(_TITLE)
        picture, alias, *shown = _choice(site)
        active = gradio.State("Look")
        here = Here(site, picture, alias, gradio.State(Newest()))
        parts = []
        with gradio.Tabs(overflow_behavior="wrap") as tabs:
            for name, tab in _TABS.items():
                with gradio.Tab(name):
                    parts.append(tab(replace(here, tab=name)))
        gradio.HTML(f'<p class="vl-limits">{_LIMITS}</p>')
        refresh = _refreshing(parts, here, active)
        _connect(here, page, *shown, refresh=refresh)
        tabs.select(_selected, None, active, queue=False, **_QUICK).then(**refresh)

        def left(request: gradio.Request) -> None:
            forget(site.place, cache, str(request.session_hash))

        page.unload(left)
    return page


def _choice(site: DemoSite) -> tuple[Component, ...]:
    """Return what a visitor chooses: the picture (a State), the model, an upload or an example, and
    what is shown of it.
    """
    picture = gradio.State(None, time_to_live=KEPT)
    with gradio.Row(equal_height=False):
        with gradio.Column(scale=3, min_width=300):
            alias = gradio.Radio(
                list(site.pool.aliases), value=site.pool.aliases[0], label="Model", elem_id="model"
            )
            shown = [(each.name, _drawn(each, site, most=96).uri) for each in site.examples]
            gallery = gradio.HTML(
                str(pieces.gallery(shown)),
                elem_id="examples",
                apply_default_css=False,
                js_on_load=_PICK,
            )
        with gradio.Column(scale=1, min_width=140):
            upload = gradio.File(label="Your picture", elem_id="upload", height=172)
        with gradio.Column(scale=1, min_width=140):
            card = gradio.HTML(elem_id="picture", js_on_load=_UPLOAD, most=UPLOAD_BYTES)
    return picture, alias, upload, gallery, card


def _drawn(picture: Picture, site: DemoSite, *, most: int = MOST) -> Embedded:
    """Return a picture as the first model sees it; most: px of a side."""
    return embedded(enlarged(picture.array(site.pool.models[0])), most=most)


def _selected(event: gradio.SelectData) -> str:
    return str(event.value)


def _refreshing(parts: Sequence[Tab], here: Here, active: Component) -> dict[str, Any]:
    """Return the handler that shows the picture in the tab that is open, with its inputs and
    outputs.

    A tab that is opened again keeps what was done in it.
    """
    ends = list(accumulate((len(part.inputs) for part in parts), initial=0))
    drawn = gradio.State({})  # what each tab shows, by its name: the picture's key and the model

    @told
    def refresh(
        picture: Picture | None,
        alias: str,
        newest: Newest,
        active: str,
        seen: dict[str, tuple[str, str]],
        request: gradio.Request,
        *values: Any,
    ) -> Updates:
        own = required(picture)
        wanted = own.key, alias
        if seen.get(active) == wanted:
            return {drawn: seen}
        for part, start, end in zip(parts, ends, ends[1:]):
            if part.name == active:
                asked = Asked(own, alias, newest.picture(active), str(request.session_hash))
                return {**part.refresh(asked, *values[start:end]), drawn: {**seen, active: wanted}}
        raise UnknownNameError("tab of this page", active, [part.name for part in parts])

    inputs = [
        here.picture,
        here.alias,
        here.newest,
        active,
        drawn,
        *(each for part in parts for each in part.inputs),
    ]
    outputs = [drawn, *dict.fromkeys(each for part in parts for each in part.outputs)]
    return {"fn": refresh, "inputs": inputs, "outputs": outputs, **EVENT}


def _connect(
    here: Here,
    page: Any,
    upload: Component,
    gallery: Component,
    card: Component,
    *,
    refresh: dict[str, Any],
) -> None:
    """Make uploads and examples the picture that the open tab shows; the same with another
    model."""
    site = here.site
    picture = here.picture
    models = here.site.pool.models

    @told
    def taken(file: str) -> Updates:
        own = read_upload(Path(file), models)
        return {picture: own, upload: None, card: str(pieces.card(own, _drawn(own, site)))}

    @told
    def of(number: int) -> Updates:
        if not 0 <= number < len(site.examples):
            raise DataError(
                f"expected an example from 0 to {len(site.examples) - 1}, found {number}"
            )
        own = site.examples[number]
        return {picture: own, card: str(pieces.card(own, _drawn(own, site)))}

    @told
    def picked(event: gradio.EventData) -> Updates:
        number = event._data.get("number") if isinstance(event._data, dict) else None
        return of(number if isinstance(number, int) else -1)

    @told
    def refused(event: gradio.EventData) -> None:
        size = event._data.get("bytes") if isinstance(event._data, dict) else None
        require_size(size if isinstance(size, int) else UPLOAD_BYTES + 1)

    here.alias.input(**refresh)
    card.refused(refused, None, None, **_QUICK)
    uploaded = upload.upload(taken, upload, [picture, upload, card], **_QUICK)
    uploaded.success(**refresh)
    uploaded.failure(lambda: None, None, upload, **_QUICK)  # so that another file can be dropped
    gallery.picked(picked, None, [picture, card], **_QUICK).success(**refresh)
    if site.examples:
        page.load(lambda: of(0), None, [picture, card], **_QUICK).success(**refresh)

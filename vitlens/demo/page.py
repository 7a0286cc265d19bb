"""The page: a picture and a model to choose, and tabs with the reports on them."""

from collections.abc import Sequence
from dataclasses import replace
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
    Component,
    DemoSite,
    Newest,
    Tab,
    TabPlace,
    TabRequest,
    Updates,
    forget,
    pieces,
    require_picture,
    showing_errors,
)
from vitlens.demo.tabs import PASSES, attack_tab, explain_tab, look_tab
from vitlens.errors import DataError, UnknownNameError
from vitlens.report.html.pictures import MOST, Embedded

LIFETIME: Final = 1800  # seconds after the last change until a session's images are deleted
_THUMBNAIL: Final = 96  # px of a side
_PICK: Final = """element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-example]");
  if (button) trigger("picked", { number: Number(button.dataset.example) });
});"""
_UPLOAD: Final = (Path(__file__).parent / "upload.js").read_text(encoding="utf-8")
# by default gradio drops an event while an earlier one of the same control is running: a tab would
# not be updated
_QUICK: Final = {"api_visibility": "private", "show_progress": "hidden", "trigger_mode": "multiple"}
_TABS: Final = {
    "Look": look_tab,
    "Explain": explain_tab,
    "Break": attack_tab,
    "Intervene": intervene_tab,
}
_TITLE: Final = (
    '<div class="vl-head-line"><h1>vitlens demo</h1><p>What a model does with a picture: layers '
    "and heads count from 0 (L3.H7). Each tab runs a command and shows its report. Runs only on "
    "this machine.</p></div>"
)
_LIMITS: Final = (
    f"Limits: files of at most {UPLOAD_BYTES // 1_000_000} MB and {PIXEL_LIMIT // 1_000_000} "
    f"megapixels, the first frame of an animation, maps and attacks of at most {PASSES} passes of "
    f"the model. The page answers one visitor at a time: a request waits for at most {WAITING:.0f} "
    f"s, and is stopped after {RUNNING:.0f} s of computing. What you upload is read once and its "
    f"file deleted at once; the pixels stay in memory for this session, at most {LIFETIME // 60} "
    "minutes after its last change, and its reports until its tab is closed."
)


def build(site: DemoSite, cache: Path) -> Any:
    """Return the page of gradio, not yet served; cache: the folder of gradio's files."""
    with gradio.Blocks(
        title="vitlens demo", analytics_enabled=False, fill_width=True, delete_cache=(60, LIFETIME)
    ) as page:
        gradio.HTML(_TITLE)
        picture, alias, upload, gallery, card = _choice(site)
        active = gradio.State("Look")
        place = TabPlace(site, picture, alias, gradio.State(Newest()))
        tabs = []
        with gradio.Tabs(overflow_behavior="wrap") as tab_bar:
            for name, make_tab in _TABS.items():
                with gradio.Tab(name):
                    tabs.append(make_tab(replace(place, tab=name)))
        gradio.HTML(f'<p class="vl-limits">{_LIMITS}</p>')
        refresh = _refreshing(tabs, place, active)
        _connect(place, page, upload, gallery, card, refresh=refresh)
        tab_bar.select(_selected, None, active, queue=False, **_QUICK).then(**refresh)

        def end_session(request: gradio.Request) -> None:
            forget(site.place, cache, str(request.session_hash))

        page.unload(end_session)
    return page


def _choice(site: DemoSite) -> tuple[Component, ...]:
    """Return the controls of a choice: picture (a State), model, upload, examples and card."""
    picture = gradio.State(None, time_to_live=LIFETIME)
    with gradio.Row(equal_height=False):
        with gradio.Column(scale=3, min_width=300):
            alias = gradio.Radio(
                list(site.pool.aliases), value=site.pool.aliases[0], label="Model", elem_id="model"
            )
            thumbnails = [
                (example.name, _embed(example, site, most=_THUMBNAIL).uri)
                for example in site.examples
            ]
            gallery = gradio.HTML(
                str(pieces.gallery(thumbnails)),
                elem_id="examples",
                apply_default_css=False,
                js_on_load=_PICK,
            )
        with gradio.Column(scale=1, min_width=140):
            upload = gradio.File(label="Your picture", elem_id="upload", height=172)
        with gradio.Column(scale=1, min_width=140):
            card = gradio.HTML(elem_id="picture", js_on_load=_UPLOAD, most=UPLOAD_BYTES)
    return picture, alias, upload, gallery, card


def _embed(picture: Picture, site: DemoSite, *, most: int = MOST) -> Embedded:
    """Return a picture as the first model sees it; most: px of a side."""
    return embedded(enlarged(picture.array(site.pool.models[0])), most=most)


def _selected(event: gradio.SelectData) -> str:
    return str(event.value)


def _refreshing(tabs: Sequence[Tab], place: TabPlace, active: Component) -> dict[str, Any]:
    """Return the handler that shows the picture in the active tab, with its inputs and outputs.

    A tab that is opened again keeps its results.
    """
    # the picture's key and the model that each tab shows, by the tab's name
    contents = gradio.State({})

    @showing_errors
    def refresh(
        picture: Picture | None,
        alias: str,
        newest: Newest,
        active: str,
        current: dict[str, tuple[str, str]],
        request: gradio.Request,
        *values: Any,
    ) -> Updates:
        chosen = require_picture(picture)
        content = (chosen.key, alias)
        if current.get(active) == content:
            return {contents: current}
        start = 0
        for tab in tabs:
            end = start + len(tab.inputs)
            if tab.name == active:
                session = str(request.session_hash)
                tab_request = TabRequest(chosen, alias, newest.picture(active), session)
                updates = tab.refresh(tab_request, *values[start:end])
                return {**updates, contents: {**current, active: content}}
            start = end
        raise UnknownNameError("tab of this page", active, [tab.name for tab in tabs])

    inputs = [place.picture, place.alias, place.newest, active, contents]
    outputs: dict[Component, None] = {contents: None}  # in order, without repetition
    for tab in tabs:
        inputs += tab.inputs
        outputs |= dict.fromkeys(tab.outputs)
    return {"fn": refresh, "inputs": inputs, "outputs": list(outputs), **EVENT}


def _connect(
    place: TabPlace,
    page: Any,
    upload: Component,
    gallery: Component,
    card: Component,
    *,
    refresh: dict[str, Any],
) -> None:
    """Show uploads, examples and another model in the active tab."""
    site = place.site
    picture = place.picture
    models = site.pool.models

    def card_of(chosen: Picture) -> str:
        return str(pieces.card(chosen, _embed(chosen, site)))

    @showing_errors
    def take_upload(file: str) -> Updates:
        chosen = read_upload(Path(file), models)
        return {picture: chosen, upload: None, card: card_of(chosen)}

    @showing_errors
    def take_example(number: int) -> Updates:
        if not 0 <= number < len(site.examples):
            raise DataError(
                f"expected an example from 0 to {len(site.examples) - 1}, found {number}"
            )
        chosen = site.examples[number]
        return {picture: chosen, card: card_of(chosen)}

    @showing_errors
    def take_click(event: gradio.EventData) -> Updates:
        number = _integer(event, "number")
        return take_example(-1 if number is None else number)

    @showing_errors
    def refuse_upload(event: gradio.EventData) -> None:
        size = _integer(event, "bytes")
        require_size(UPLOAD_BYTES + 1 if size is None else size)

    place.alias.input(**refresh)
    card.refused(refuse_upload, None, None, **_QUICK)
    uploaded = upload.upload(take_upload, upload, [picture, upload, card], **_QUICK)
    uploaded.success(**refresh)
    uploaded.failure(lambda: None, None, upload, **_QUICK)  # so that another file can be dropped
    gallery.picked(take_click, None, [picture, card], **_QUICK).success(**refresh)
    if site.examples:
        page.load(lambda: take_example(0), None, [picture, card], **_QUICK).success(**refresh)


def _integer(event: gradio.EventData, name: str) -> int | None:
    """Return an integer of a browser's message, None for anything else."""
    value = event._data.get(name) if isinstance(event._data, dict) else None
    return value if isinstance(value, int) else None

"""The page: a picture and a model to choose, and tabs with the reports on them.

A component of gradio is both a control on the page and a key of the updates that a handler returns.
A State is a component that is not shown; it keeps a value for each visitor.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import gradio

from vitlens.charts.overlay import enlarged
from vitlens.data.decode import PIXEL_LIMIT
from vitlens.demo.intervene import intervene_tab
from vitlens.demo.pictures import UPLOAD_BYTES, Picture, embedded, read_upload, require_size
from vitlens.demo.pool import RUNNING, WAITING
from vitlens.demo.site import (
    EVENT_WITH_MODEL,
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
# runs in the browser: a click on an example triggers the event `picked` of the gallery
_PICK: Final = """element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-example]");
  if (button) trigger("picked", { number: Number(button.dataset.example) });
});"""
_UPLOAD: Final = (Path(__file__).parent / "upload.js").read_text(encoding="utf-8")
# by default gradio drops an event while an earlier one of the same control is running: a tab would
# not be updated
_EVENT_WITHOUT_MODEL: Final = {
    "api_visibility": "private",
    "show_progress": "hidden",
    "trigger_mode": "multiple",
}
# the tabs in order, with the functions that build them
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


class _Choice(NamedTuple):
    """The components with which a visitor chooses.

    picture: a State of the chosen Picture, or None.
    alias: the model.
    upload: a file to choose instead of an example.
    gallery: the examples.
    card: shows the chosen picture; its script refuses files that are too large (upload.js).
    """

    picture: Component
    alias: Component
    upload: Component
    gallery: Component
    card: Component


def build(site: DemoSite, cache: Path) -> Any:
    """Return the page of gradio, not yet served; cache: the folder of gradio's files."""
    # unused files are deleted after LIFETIME seconds; gradio looks for them every 60
    with gradio.Blocks(
        title="vitlens demo", analytics_enabled=False, fill_width=True, delete_cache=(60, LIFETIME)
    ) as page:
        gradio.HTML(_TITLE)
        choice = _place_choice(site)
        active = gradio.State("Look")  # the name of the tab that is open
        place = TabPlace(site, choice.picture, choice.alias, newest=gradio.State(Newest()))
        tabs = []
        with gradio.Tabs(overflow_behavior="wrap") as tab_bar:
            for name, make_tab in _TABS.items():
                with gradio.Tab(name):
                    tabs.append(make_tab(replace(place, tab=name)))
        gradio.HTML(f'<p class="vl-limits">{_LIMITS}</p>')
        refresh = _refreshing(tabs, place, active)
        _connect(site, page, choice, refresh=refresh)
        tab_bar.select(_selected, None, active, queue=False, **_EVENT_WITHOUT_MODEL).then(**refresh)

        def end_session(request: gradio.Request) -> None:
            forget(site.place, cache, str(request.session_hash))

        page.unload(end_session)
    return page


def _place_choice(site: DemoSite) -> _Choice:
    """Place the components of the choice on the page; return them."""
    picture = gradio.State(None, time_to_live=LIFETIME)
    with gradio.Row(equal_height=False):
        with gradio.Column(scale=3, min_width=300):
            alias = gradio.Radio(
                list(site.pool.aliases), value=site.pool.aliases[0], label="Model", elem_id="model"
            )
            thumbnails = []
            for example in site.examples:
                thumbnails.append((example.name, _embed(example, site, most=_THUMBNAIL).uri))
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
    return _Choice(picture, alias, upload=upload, gallery=gallery, card=card)


def _embed(picture: Picture, site: DemoSite, *, most: int = MOST) -> Embedded:
    """Return a picture as the first model sees it; most: px of a side."""
    return embedded(enlarged(picture.array(site.pool.models[0])), most=most)


def _selected(event: gradio.SelectData) -> str:
    return str(event.value)


def _refreshing(tabs: Sequence[Tab], place: TabPlace, active: Component) -> dict[str, Any]:
    """Return the keyword arguments of an event that shows the picture in the active tab.

    These are fn, inputs, outputs and settings. A tab that is opened again keeps its results.
    """
    # the picture's key and the model that each tab shows, by the tab's name
    shown = gradio.State({})

    @showing_errors
    def refresh(
        picture: Picture | None,
        alias: str,
        newest: Newest,
        active_name: str,
        shown_by_tab: dict[str, tuple[str, str]],
        request: gradio.Request,
        *values: Any,
    ) -> Updates:
        chosen = require_picture(picture)
        content = (chosen.key, alias)
        if shown_by_tab.get(active_name) == content:
            return {shown: shown_by_tab}
        # `values` are those of the inputs of all tabs, one tab after the other
        start = 0
        for tab in tabs:
            end = start + len(tab.inputs)
            if tab.name == active_name:
                is_current = newest.register_picture(active_name)
                session = str(request.session_hash)
                tab_request = TabRequest(chosen, alias, is_current, session)
                updates = tab.refresh(tab_request, *values[start:end])
                return {**updates, shown: {**shown_by_tab, active_name: content}}
            start = end
        raise UnknownNameError("tab of this page", active_name, [tab.name for tab in tabs])

    inputs = [place.picture, place.alias, place.newest, active, shown]
    outputs: dict[Component, None] = {shown: None}  # in order, without repetition
    for tab in tabs:
        inputs += tab.inputs
        outputs.update(dict.fromkeys(tab.outputs))
    return {"fn": refresh, "inputs": inputs, "outputs": list(outputs), **EVENT_WITH_MODEL}


def _connect(site: DemoSite, page: Any, choice: _Choice, *, refresh: dict[str, Any]) -> None:
    """Show uploads, examples and another model in the active tab.

    refresh: the arguments of an event that shows the choice there, see `_refreshing`.
    """

    def choose(picture: Picture) -> Updates:
        card = str(pieces.card(picture, _embed(picture, site)))
        return {choice.picture: picture, choice.card: card}

    @showing_errors
    def take_upload(file: str) -> Updates:
        picture = read_upload(Path(file), site.pool.models)
        return {**choose(picture), choice.upload: None}

    @showing_errors
    def take_example(number: int) -> Updates:
        if not 0 <= number < len(site.examples):
            raise DataError(
                f"expected an example from 0 to {len(site.examples) - 1}, found {number}"
            )
        return choose(site.examples[number])

    @showing_errors
    def take_click(event: gradio.EventData) -> Updates:
        number = _integer(event, "number")
        return take_example(-1 if number is None else number)  # -1: refused

    @showing_errors
    def refuse_upload(event: gradio.EventData) -> None:
        size = _integer(event, "bytes")
        require_size(UPLOAD_BYTES + 1 if size is None else size)  # raises DataError, the sentence

    # events: a handler, its inputs, and the components that it updates
    chosen = [choice.picture, choice.card]
    choice.alias.input(**refresh)
    choice.card.refused(refuse_upload, None, None, **_EVENT_WITHOUT_MODEL)
    uploaded = choice.upload.upload(
        take_upload, choice.upload, [*chosen, choice.upload], **_EVENT_WITHOUT_MODEL
    )
    uploaded.success(**refresh)
    # so that another file can be dropped
    uploaded.failure(lambda: None, None, choice.upload, **_EVENT_WITHOUT_MODEL)
    choice.gallery.picked(take_click, None, chosen, **_EVENT_WITHOUT_MODEL).success(**refresh)
    if site.examples:
        page.load(lambda: take_example(0), None, chosen, **_EVENT_WITHOUT_MODEL).success(**refresh)


def _integer(event: gradio.EventData, name: str) -> int | None:
    """Return an integer of a browser's message, None for anything else."""
    message = event._data
    if not isinstance(message, dict):
        return None
    value = message.get(name)
    return value if isinstance(value, int) else None

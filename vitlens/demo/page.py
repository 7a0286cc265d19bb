"""The page: a picture and a model to choose, and the tabs that show what it does with it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import gradio
from markupsafe import Markup

from vitlens.charts.overlay import enlarged
from vitlens.demo.limits import KEPT, UPLOAD_BYTES, limit_words
from vitlens.demo.markup import Card, cards, examples_html, joined
from vitlens.demo.pictures import Picture, of_example, read_upload, require_size
from vitlens.demo.site import EVENT, Asked, Component, DemoSite, Here, Newest, TabParts, Updates, required, told
from vitlens.demo.tabs.attack import attack_tab
from vitlens.demo.tabs.explain import explain_tab
from vitlens.demo.tabs.intervene import intervene_tab
from vitlens.demo.tabs.look import look_tab
from vitlens.demo.tabs.report import forget, report_tab
from vitlens.demo.tabs.space import space_tab
from vitlens.errors import DataError, UnknownNameError

_PICK: Final = """element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-example]");
  if (button) trigger("picked", { number: Number(button.dataset.example) });
});"""
_UPLOAD: Final = (Path(__file__).parent / "upload.js").read_text(encoding="utf-8")
# by default gradio drops an event while an earlier one of the same control is under way: a tab would stay as it was
_QUICK: Final = {"api_visibility": "private", "show_progress": "hidden", "trigger_mode": "multiple"}
_TABS: Final = {
    "Look": look_tab,
    "Explain": explain_tab,
    "Break": attack_tab,
    "Intervene": intervene_tab,
    "3D": space_tab,
}
_TITLE: Final = (
    '<div class="vl-head-line"><h1>vitlens demo</h1><p>What a model does with a picture: layers and heads count from 0 '
    "(L3.H7). Runs on this machine alone.</p></div>"
)


def build(site: DemoSite, cache: Path) -> Any:
    """The page of gradio, not yet served; cache: where gradio keeps files of this page."""
    with gradio.Blocks(title="vitlens demo", analytics_enabled=False, fill_width=True, delete_cache=(60, KEPT)) as page:
        gradio.HTML(_TITLE)
        picture = gradio.State(None, time_to_live=KEPT)
        active = gradio.State("Look")
        alias, upload, gallery, card = _chooser(site)
        here = Here(site, picture, alias, gradio.State(Newest()), gradio.State({}))
        tabs, parts = _tabs(here)
        gradio.HTML(str(Markup('<p class="vl-limits">{}</p>').format(limit_words())))
        refresh = _refreshing(parts, here, active)
        _connect(site, page, (picture, upload, gallery, card), refresh)
        alias.input(**refresh)
        tabs.select(_selected, None, active, queue=False, **_QUICK).then(**refresh)

        def left(request: gradio.Request) -> None:
            forget(site.place, cache, str(request.session_hash))

        page.unload(left)
    return page


def _chooser(site: DemoSite) -> tuple[Component, Component, Component, Component]:
    """The model, the upload, the examples, and the picture that is shown."""
    with gradio.Row(equal_height=False):
        with gradio.Column(scale=3, min_width=300):
            alias = gradio.Radio(list(site.pool.aliases), value=site.pool.aliases[0], label="Model", elem_id="model")
            gallery = gradio.HTML(
                examples_html(site.examples), elem_id="examples", apply_default_css=False, js_on_load=_PICK
            )
        with gradio.Column(scale=1, min_width=140):
            upload = gradio.File(label="Your picture", elem_id="upload", height=172)
        with gradio.Column(scale=1, min_width=140):
            card = gradio.HTML(elem_id="picture", elem_classes=["vl-picture"], js_on_load=_UPLOAD, most=UPLOAD_BYTES)
    return alias, upload, gallery, card


def _tabs(here: Here) -> tuple[Component, tuple[TabParts, ...]]:
    parts: list[TabParts] = []
    with gradio.Tabs(overflow_behavior="wrap") as tabs:
        for name, tab in _TABS.items():
            with gradio.Tab(name):
                parts.append(tab(replace(here, tab=name)))
        with gradio.Tab("Report"):
            parts.append(report_tab(replace(here, tab="Report"), tuple(parts)))
    return tabs, tuple(parts)


def _selected(event: gradio.SelectData) -> str:
    return str(event.value)


def _refreshing(parts: Sequence[TabParts], here: Here, active: Component) -> dict[str, Any]:
    """The handler that shows the picture in the tab that is open, with its inputs and outputs.

    A tab that is opened again keeps what was done in it.
    """
    ends = list(accumulate((len(part.inputs) for part in parts), initial=0))
    drawn = here.drawn

    @told
    def refresh(
        picture: Picture | None,
        alias: str,
        newest: Newest,
        active: str,
        seen: dict[str, tuple[str, str]],
        *values: Any,
    ) -> Updates:
        own = required(picture)
        wanted = own.key, alias
        if seen.get(active) == wanted:
            return {drawn: seen}
        for part, start, end in zip(parts, ends, ends[1:]):
            if part.name == active:
                updates = part.refresh(Asked(own, alias, newest.picture(active)), *values[start:end])
                return {**updates, drawn: {**seen, active: wanted}}
        raise UnknownNameError("tab of this page", active, [part.name for part in parts])

    inputs = [here.picture, here.alias, here.newest, active, drawn, *(each for part in parts for each in part.inputs)]
    outputs = [drawn, *dict.fromkeys(each for part in parts for each in part.outputs)]
    return {"fn": refresh, "inputs": inputs, "outputs": outputs, **EVENT}


def _connect(site: DemoSite, page: Any, chosen: tuple[Component, ...], refresh: dict[str, Any]) -> None:
    """Uploads and examples become the picture, which the open tab then shows."""
    picture, upload, gallery, card = chosen
    models = site.pool.models

    def card_of(own: Picture) -> str:
        model = models[0]
        pixels = enlarged(own.array(model))
        note = f"({own.note})" if own.note else ""
        return joined(cards([Card(pixels, own.name, f"the picture: {own.name}", note)]))

    @told
    def taken(file: str) -> Updates:
        own = read_upload(Path(file), models)
        return {picture: own, upload: None, card: card_of(own)}

    @told
    def of(number: int) -> Updates:
        if not 0 <= number < len(site.examples):
            raise DataError(f"expected an example from 0 to {len(site.examples) - 1}, found {number}")
        own = of_example(site.examples[number], models)
        return {picture: own, card: card_of(own)}

    @told
    def picked(event: gradio.EventData) -> Updates:
        number = event._data.get("number") if isinstance(event._data, dict) else None
        return of(number if isinstance(number, int) else -1)

    @told
    def refused(event: gradio.EventData) -> None:
        size = event._data.get("bytes") if isinstance(event._data, dict) else None
        require_size(size if isinstance(size, int) else UPLOAD_BYTES + 1)

    card.refused(refused, None, None, **_QUICK)
    uploaded = upload.upload(taken, upload, [picture, upload, card], **_QUICK)
    uploaded.success(**refresh)
    uploaded.failure(lambda: None, None, upload, **_QUICK)  # so that another file can be dropped
    gallery.picked(picked, None, [picture, card], **_QUICK).success(**refresh)
    if site.examples:
        page.load(lambda: of(0), None, [picture, card], **_QUICK).success(**refresh)

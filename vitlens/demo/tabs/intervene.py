"""The tab Intervene."""

from pathlib import Path

import gradio

from vitlens.demo.markup import joined, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.site import DemoSite, NowShown, TabParts, Updates, required
from vitlens.demo.telling import told
from vitlens.demo.views.board import board_html
from vitlens.demo.views.intervene import Off, answer_html, answered, read_off, switches_of
from vitlens.errors import UnsupportedError

_SCRIPT = (Path(__file__).parents[1] / "board.js").read_text(encoding="utf-8")


def intervene_tab(site: DemoSite, shown: NowShown) -> TabParts:
    """A board of heads and a picture of patches to switch off; the prediction and its map answer."""
    with gradio.Row():
        with gradio.Column(scale=3, min_width=300):
            board = gradio.HTML(elem_id="intervene-board", apply_default_css=False, js_on_load=_SCRIPT)
        with gradio.Column(scale=2, min_width=280):
            result = gradio.HTML(elem_id="intervene-result")

    def refresh(picture: Picture, alias: str) -> Updates:
        """Another picture or model: everything on."""
        with site.pool.turn(alias) as (model,):
            try:
                switches = switches_of(model)
            except UnsupportedError as error:
                return {board: joined(sentence(f"{error}.")), result: ""}
            answer = answered(model, picture, Off())
            return {board: board_html(model, picture, switches), result: answer_html(answer, model, picture)}

    @told
    def switched(picture: Picture | None, alias: str, event: gradio.EventData) -> str:
        own = required(picture)
        with site.pool.turn(alias) as (model,):
            off = read_off(event._data, switches_of(model))
            return answer_html(answered(model, own, off), model, own)

    board.switched(
        switched,
        [shown.picture, shown.alias],
        result,
        **{**site.event, "show_progress": "hidden"},
    )
    return TabParts("Intervene", (), (board, result), refresh)

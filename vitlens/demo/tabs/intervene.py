"""The tab Intervene."""

from pathlib import Path

import gradio

from vitlens.demo.markup import joined, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.pool import OutdatedError
from vitlens.demo.site import Asked, DemoSite, Newest, NowShown, TabParts, Updates, asked, required
from vitlens.demo.telling import told
from vitlens.demo.views.board import board_html, board_key
from vitlens.demo.views.intervene import Answer, Off, answer_html, answered, read_off, switches_of
from vitlens.errors import UnsupportedError

_NAME = "Intervene"
_SCRIPT = (Path(__file__).parents[1] / "board.js").read_text(encoding="utf-8")


def intervene_tab(site: DemoSite, shown: NowShown) -> TabParts:
    """A board of heads and a picture of patches to switch off; the prediction and its map answer."""
    with gradio.Row():
        with gradio.Column(scale=3, min_width=300):
            board = gradio.HTML(elem_id="intervene-board", apply_default_css=False, js_on_load=_SCRIPT)
        with gradio.Column(scale=2, min_width=280):
            result = gradio.HTML(elem_id="intervene-result")
    is_off = gradio.State(Off())  # in the result that is shown
    whole = gradio.State({})  # by the board's key: what the model says of the picture with nothing off

    def refresh(now: Asked) -> Updates:
        """Another picture or model: everything on."""
        with site.pool.turn(now.alias, wanted=now.wanted) as (model,):
            try:
                switches = switches_of(model)
            except UnsupportedError as error:
                others = sentence("Look, Explain, Break and Report work for this model.", "quiet")
                return {board: joined(sentence(f"{error}."), others), result: "", is_off: Off(), whole: {}}
            answer = answered(model, now.picture, Off())
            html = board_html(model, now.picture, switches), answer_html(answer, model, now.picture)
        return {**dict(zip((board, result), html)), is_off: Off(), whole: {board_key(model, now.picture): answer}}

    @told
    def switched(
        picture: Picture | None, alias: str, newest: Newest, known: dict[str, Answer], event: gradio.EventData
    ) -> Updates:
        board_of = event._data.get("board") if isinstance(event._data, dict) else None
        if board_of is not None and board_of != board_key(site.pool.model(alias), required(picture)):
            raise OutdatedError("expected a click on the board of this picture and model, found one on another's")
        now = asked(_NAME, picture, alias, newest)
        with site.pool.turn(alias, wanted=now.wanted) as (model,):
            off = read_off(event._data, switches_of(model))
            answer = answered(model, now.picture, off, whole=known.get(board_key(model, now.picture)))
            return {result: answer_html(answer, model, now.picture), is_off: off}

    board.switched(switched, [*shown.inputs, whole], [result, is_off], **{**site.event, "show_progress": "hidden"})
    return TabParts(_NAME, (), (board, result, is_off, whole), refresh, {"off": is_off})

"""The tab Look."""

import gradio

from vitlens.demo.pictures import Picture
from vitlens.demo.site import DemoSite, NowShown, TabParts, Updates
from vitlens.demo.views.look import look_at, look_html


def look_tab(site: DemoSite, _: NowShown) -> TabParts:
    """The prediction and its map, above the attention explorer."""
    top = gradio.HTML(elem_id="look-top")
    explorer = gradio.HTML(elem_id="look-explorer")

    def refresh(picture: Picture, alias: str) -> Updates:
        with site.pool.turn(alias) as (model,):
            html = look_html(look_at(model, picture), model, picture)
        return dict(zip((top, explorer), html, strict=True))

    return TabParts("Look", (), (top, explorer), refresh)

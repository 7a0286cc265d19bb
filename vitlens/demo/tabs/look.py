"""The tab Look."""

import gradio

from vitlens.demo.site import Asked, DemoSite, NowShown, TabParts, Updates
from vitlens.demo.views.look import look_at, look_html


def look_tab(site: DemoSite, _: NowShown) -> TabParts:
    """The prediction and its map, above the attention explorer."""
    top = gradio.HTML(elem_id="look-top")
    explorer = gradio.HTML(elem_id="look-explorer")

    def refresh(now: Asked) -> Updates:
        with site.pool.turn(now.alias, wanted=now.wanted) as (model,):
            html = look_html(look_at(model, now.picture), model, now.picture)
        return dict(zip((top, explorer), html, strict=True))

    return TabParts("Look", (), (top, explorer), refresh)

"""The tab 3D."""

import gradio

from vitlens.demo.markup import joined, said
from vitlens.demo.pictures import Picture
from vitlens.demo.site import Shown, Site, TabParts, Updates
from vitlens.demo.views.space import space_figure, space_of, space_words
from vitlens.errors import UnsupportedError


def space_tab(site: Site, _: Shown) -> TabParts:
    """The attention of all layers and heads in space."""
    words = gradio.HTML(elem_id="space-words")
    plot = gradio.Plot(elem_id="space-plot", label="Attention by layer, head and patch", show_label=False)

    def refresh(picture: Picture, alias: str) -> Updates:
        with site.pool.turn(alias) as (model,):
            try:
                space = space_of(model, picture)
            except UnsupportedError as error:
                return {words: joined(said(f"{error}.")), plot: None}
        return {words: joined(said(space_words(space))), plot: space_figure(space)}

    return TabParts("3D", (), (words, plot), refresh)

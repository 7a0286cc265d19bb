"""The tab 3D."""

import gradio

from vitlens.demo.markup import joined, said, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.site import Asked, DemoSite, Newest, NowShown, TabParts, Updates, asked
from vitlens.demo.tabs.slider import open_slider
from vitlens.demo.telling import told
from vitlens.demo.views.space import space_figure, space_of, space_words
from vitlens.errors import UnsupportedError

_NAME = "3D"
_SHARE = 25  # % of the points at first: of all of them, those in front hide the others


def space_tab(site: DemoSite, shown: NowShown) -> TabParts:
    """The attention of all layers and heads in space."""
    share = open_slider(
        1, 100, value=_SHARE, step=1, label="Share of all points that is shown, the strongest first, in %",
        elem_id="space-share",
    )  # fmt: skip
    words = gradio.HTML(elem_id="space-words")
    done = gradio.State(())  # the share of the points that are shown
    plot = gradio.Plot(elem_id="space-plot", label="Attention by layer, head and patch", show_label=False)

    def refresh(now: Asked, percent: float) -> Updates:
        with site.pool.turn(now.alias, wanted=now.wanted) as (model,):
            try:
                space = space_of(model, now.picture, share=percent / 100)
            except UnsupportedError as error:
                others = sentence("Look, Explain, Break and Report work for this model.", "quiet")
                return {words: joined(said(f"{error}."), others), plot: gradio.Plot(visible=False), done: (1.0,)}
        figure = gradio.Plot(space_figure(space), visible=True)
        return {words: joined(said(space_words(space))), plot: figure, done: (percent / 100,)}

    @told
    def again(picture: Picture | None, alias: str, newest: Newest, percent: float) -> Updates:
        return refresh(asked(_NAME, picture, alias, newest), percent)

    share.release(again, [*shown.inputs, share], [words, plot, done], **site.event)
    return TabParts(_NAME, (share,), (words, plot, done), refresh, {"done": done})

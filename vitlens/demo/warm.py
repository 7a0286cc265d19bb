"""One pass of everything that the page does, so that the first visitor does not wait for checks that run once."""

from vitlens.demo.pictures import Picture
from vitlens.demo.pool import Pool
from vitlens.demo.views.intervene import Off, answered, switches_of
from vitlens.demo.views.look import look_at, look_html
from vitlens.errors import UnsupportedError


def warm_up(pool: Pool, picture: Picture) -> None:
    """Look at a picture with every model, and switch a head off: the lens and replay check themselves once."""
    for model in pool.models:  # before anyone is served: without a limit on time
        look_html(look_at(model, picture), model, picture)
        try:
            heads = switches_of(model).heads
        except UnsupportedError:
            continue
        answered(model, picture, Off(heads[:1]))

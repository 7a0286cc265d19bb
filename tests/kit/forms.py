"""Pictures for the tests of the demo."""

from collections.abc import Sequence

from torch import Tensor

import vitlens
from vitlens.demo.badges import Badges
from vitlens.demo.pictures import Picture
from vitlens.demo.pool import pool_of
from vitlens.demo.tabs import attack, explain, intervene, look, space
from vitlens.models.model import Model
from vitlens.models.support import meets


def picture_of(models: Sequence[Model], *, seed: int = 0) -> Picture:
    """A scene of a digit as each of these models of digits sees it."""
    split = vitlens.load_data("digits", limit=1, seed=seed)
    (batch,) = split.batches(1)
    pixels = (batch.images * 255).round().byte()
    return Picture("key", "scene.png", "", {model.alias: pixels for model in models})


def every_view(model: Model, batch: Tensor) -> list[str]:
    """The HTML of every tab for the first image of a batch in [0, 1], as far as the model has them."""
    (served,) = pool_of([model]).models
    picture = Picture("key", "a.png", "", {model.alias: (batch[:1] * 255).round().byte()})
    shown = [*look.look_html(look.look_at(served, picture), served, picture)]
    shown.append(attack.broken_html(attack.broken(served, picture, "fgsm", 4.0)))
    method = explain.offered_methods(served)[0]
    side = explain.explained(served, picture, method, explain.PREDICTED)
    shown.append(explain.sides_html(((side, served),) * 2, picture, Badges(), 0.5))
    if meets(model, "heads"):
        switches = intervene.switches_of(served)
        off = intervene.Off(switches.heads[:2], () if switches.grid is None else (0,))
        answer = intervene.answered(served, picture, off, switches)
        shown += [intervene.board_html(served, picture, switches), intervene.answer_html(answer, served, picture)]
    if meets(model, "maps"):
        shown.append(space.space_html(space.space_of(served, picture)))
    return shown

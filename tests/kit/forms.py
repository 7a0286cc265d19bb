"""Pictures and reports for the tests of the demo."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

import vitlens
from vitlens.analysis.ablation.units import require_heads
from vitlens.demo import intervene, tabs
from vitlens.demo.pictures import Picture
from vitlens.demo.pool import Pool
from vitlens.demo.site import DemoSite, Write, write_page
from vitlens.errors import typed_flags
from vitlens.models.model import Model


def picture_of(models: Sequence[Model], *, seed: int = 0) -> Picture:
    """Return a scene of a digit as each of these models of digits sees it."""
    (batch,) = vitlens.load_data("digits", limit=1, seed=seed).batches(1)
    return Picture(
        "key",
        "scene.png",
        "",
        {model.alias: (batch.images * 255).round().byte() for model in models},
    )


def write(model: Model, picture: Picture, function: Write, place: Path, **options: Any) -> Path:
    """Return the page of a report of a tab, with its archive next to it."""
    site = DemoSite(Pool((model,)), (), place)
    return write_page(site, model, picture, partial(function, **options), session="one", word="tab")


def every_view(model: Model, batch: Tensor) -> list[str]:
    """Return the HTML of every tab of `vitlens demo` for the first image of a batch in [0, 1]."""
    (served,) = Pool((model,)).models
    picture = Picture("key", "a.png", "", {model.alias: (batch[:1] * 255).round().byte()})
    views: list[tuple[Write, dict[str, Any]]] = [
        (tabs.write_look, {}),
        (tabs.write_explain, {"method": tabs.offered_methods(served)[0], "target": tabs.PREDICTED}),
        (tabs.write_attack, {"attack": "fgsm", "epsilon": 4.0}),
    ]
    pages = []
    if require_heads.is_met(model):
        switches = intervene.switches_of(served)
        off = {"heads": switches.heads[:2], "patches": () if switches.grid is None else (0,)}
        views.append((intervene.write_intervened, {"off": off}))
        pages.append(intervene.board_html(served, picture, switches, {}))
    with typed_flags(), TemporaryDirectory() as place:
        return [
            *pages,
            *(
                write(served, picture, view, Path(place), **more).read_text("utf-8")
                for view, more in views
            ),
        ]

"""The board of Intervene: heads to click and patches to paint, as HTML that board.js makes lively."""

from itertools import groupby

import numpy as np
from markupsafe import Markup
from matplotlib import colormaps

from vitlens.analysis.attention.weights import attention_maps
from vitlens.charts.overlay import enlarged
from vitlens.charts.style import MAGNITUDE
from vitlens.demo.markup import joined, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.views.intervene import Head, Switches
from vitlens.demo.views.maps import Floats, picture_array
from vitlens.models.model import Model
from vitlens.models.support import meets
from vitlens.report.html import pictures


def board_html(model: Model, picture: Picture, switches: Switches) -> str:
    """Everything on: a button a head, with its attention on the picture, and a button a patch over the picture."""
    return joined(
        Markup('<div class="vl-switches" data-board="{}">{}{}</div>').format(
            board_key(model, picture), _patches(model, picture, switches), _heads(switches, _attention(model, picture))
        ),
        Markup('<p class="vl-say"><button type="button" class="vl-reset" data-reset>Everything on</button></p>'),
    )


def board_key(model: Model, picture: Picture) -> str:
    """What tells the board of a model and a picture from all others."""
    return f"{picture.key} {model.alias}"


def _attention(model: Model, picture: Picture) -> dict[Head, Floats]:
    """The map of each head whose attention is one."""
    if not meets(model, "maps"):
        return {}
    return {
        (layer.site.layer, head): values.double().cpu().numpy()
        for layer in attention_maps(model, picture.images(model))
        for head, values in enumerate(layer.maps[0])
    }


def _heads(switches: Switches, attention: dict[Head, Floats]) -> Markup:
    rows = [
        _layer(layer, row, list(heads), attention)
        for row, (layer, heads) in enumerate(groupby(sorted(switches.heads), key=lambda each: each[0]))
    ]
    most = 1 + max(head for _, head in switches.heads)
    names = Markup("").join(Markup("<span>H{}</span>").format(head) for head in range(most))
    return Markup(
        '<div><p class="vl-say">Click a head to switch it off, or a layer for all its heads. Arrow keys move, space '
        'switches.</p><div class="vl-heads" role="group" aria-label="Heads, a row each layer">'
        '<div class="vl-layer vl-names" aria-hidden="true"><span class="vl-whole"></span>{}</div>{}</div></div>'
    ).format(names, Markup("").join(rows))


def _layer(layer: int, row: int, heads: list[Head], attention: dict[Head, Floats]) -> Markup:
    cells = Markup("").join(_head(each, row, column, attention.get(each)) for column, each in enumerate(heads))
    return Markup(
        '<div class="vl-layer"><button type="button" class="vl-whole" data-layer="{0}" tabindex="-1" '
        'aria-label="all heads of layer {0}">L{0}</button>{1}</div>'
    ).format(layer, cells)


def _head(head: Head, row: int, column: int, values: Floats | None) -> Markup:
    style = Markup("")
    if values is not None:
        shares = np.asarray(values / (float(values.max()) or 1.0))
        drawn = np.asarray(colormaps[MAGNITUDE](shares))[..., :3]
        uri = pictures.photograph(np.round(drawn * 255).astype(np.uint8)).uri
        style = Markup(' style="background-image:url({})"').format(uri)
    return Markup(
        '<button type="button" class="vl-head" data-head="{0}.{1}" data-at="{2},{3}" aria-pressed="false" '
        'tabindex="{4}" aria-label="switch off head L{0}.H{1}" title="L{0}.H{1}"{5}></button>'
    ).format(*head, row, column, 0 if row == column == 0 else -1, style)


def _patches(model: Model, picture: Picture, switches: Switches) -> Markup:
    """The picture with a grid of buttons, or why no patch can be switched off."""
    if switches.grid is None:
        return sentence(f"No patches of {model.alias} can be switched off: {switches.reason}.", "quiet")
    rows, columns = switches.grid
    pixels = np.round(np.clip(enlarged(picture_array(picture, model)), 0, 1) * 255).astype(np.uint8)
    height, width = pixels.shape[:2]
    cells = Markup("").join(
        Markup(
            '<button type="button" class="vl-patch" data-patch="{}" data-at="{},{}" aria-pressed="false" tabindex="{}" '
            'aria-label="switch off the patch at row {}, column {}"></button>'
        ).format(row * columns + column, row, column, -1 if row or column else 0, row, column)
        for row in range(rows)
        for column in range(columns)
    )
    return Markup(
        '<div><p class="vl-say">Paint over patches to switch them off; paint again to switch them on.</p>'
        '<div class="vl-paint" role="group" aria-label="Patches of the picture" '
        'style="--columns:{};aspect-ratio:{}/{};background-image:url({})">{}</div></div>'
    ).format(columns, width, height, pictures.photograph(pixels).uri, cells)

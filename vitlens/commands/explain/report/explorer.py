"""The attention explorer of a ViT with the map of every method."""

from vitlens.commands.explain.record import MAPS
from vitlens.commands.explain.report.maps import below, images_of, is_drawable, methods_of
from vitlens.commands.shared.explorer import Shown, explored, explorer_of
from vitlens.records import Record
from vitlens.report.explorer import Explorer


def explain_explorer(record: Record) -> Explorer | None:
    """The explorer of the first model that has one, its drawn images with their maps."""
    alias = explored(record)
    if alias is None:
        return None
    arrays, images = record.arrays(MAPS, model=alias), images_of(record, alias)
    maps = {
        row.title: arrays.maps[index]
        for index, row in enumerate(methods_of(record, alias))
        if all(map(is_drawable, arrays.maps[index][: len(arrays.images)]))
    }
    return explorer_of(
        record, Shown(arrays.images, [row.image for row in images], [[below(row)] for row in images], maps)
    )

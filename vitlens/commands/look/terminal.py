"""Print the first images of `vitlens look`: predictions, and the heads that matter most."""

from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitlens.commands.look.record import LookRecord
from vitlens.display import for_terminal

SHOWN: Final = 4  # images
_BAR: Final = 20  # characters of a probability of 1


def print_look(record: LookRecord, console: Console | None = None) -> None:
    """Print the first images on standard error; standard output gets only the report's path."""
    console = console or Console(stderr=True)
    (row,) = record.look
    for image, name in enumerate(record.names[:SHOWN]):
        console.print(Text(for_terminal(name), style="bold"))
        console.print(_classes(record, image))
        if row.heads:
            console.print(_heads(record, image))
        elif not row.note:  # else the note, printed at the end, says why
            console.print(Text("no heads to ablate"))
    if len(record.names) > SHOWN:
        console.print(
            f"the report shows all {len(record.names)} images", markup=False, highlight=False
        )
    if row.note:
        console.print(Text(row.note), soft_wrap=True)


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def _classes(record: LookRecord, image: int) -> Table:
    """Return the most probable classes of an image, with bars."""
    if record.phrases:
        return _phrases(record, image)
    table = _table()
    table.show_header = False
    for label, probability in record.predictions[image].top_classes:
        table.add_row(_percent(probability), Text(for_terminal(label)), _bar(probability))
    return table


def _percent(probability: float) -> Text:
    return Text(f"{100 * probability:5.1f} %")


def _bar(probability: float) -> Text:
    return Text("█" * round(_BAR * probability), style="cyan")


def _phrases(record: LookRecord, image: int) -> Table:
    """Return the similarity of an image to each phrase, with bars of the probabilities."""
    table = _table()
    table.add_column("similarity")
    table.add_column("phrase")
    for row in record.phrases_of(image):
        cells = [Text(f"{row.similarity:.3f}"), Text(for_terminal(row.phrase))]
        if row.probability is not None:
            cells += [_percent(row.probability), _bar(row.probability)]
        table.add_row(*cells)
    return table


def _heads(record: LookRecord, image: int) -> Table:
    """Return the heads that matter most for an image."""
    table = _table()
    table.add_column("head")
    _, probability = record.answer(image)
    table.add_column(f"without it (with: {100 * probability:.1f} %)")
    table.add_column("attends to")
    for head in record.heads_of(image):
        table.add_row(head.name, f"{100 * head.probability:.1f} %", Text(head.attends or ""))
    return table

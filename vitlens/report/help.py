"""The help.md of a command, as the report of its runs repeats it."""

from collections.abc import Mapping
from importlib.resources import files


def help_of(package: str) -> Mapping[str, tuple[str, ...]]:
    """Return the paragraphs of a command's help.md by heading, none if it has no such file."""
    path = files(package).joinpath("help.md")
    if not path.is_file():
        return {}
    parts: dict[str, tuple[str, ...]] = {}
    _, *blocks = path.read_text("utf-8").split("\n## ")  # before the first heading is the title
    for block in blocks:
        title, _, text = block.partition("\n")
        paragraphs = []
        text = text.replace("\n- ", "\n\n")  # an item of a list is a paragraph
        for paragraph in text.split("\n\n"):
            line = " ".join(paragraph.split())
            if line:
                paragraphs.append(line)
        parts[title.strip()] = tuple(paragraphs)
    return parts

"""The help.md of a command, as the report of its runs repeats it."""

from collections.abc import Mapping
from importlib.resources import files


def help_of(package: str) -> Mapping[str, tuple[str, ...]]:
    """Return the paragraphs of a command's help.md by heading, none if it has no such file."""
    path = files(package).joinpath("help.md")
    if not path.is_file():
        return {}
    parts: dict[str, tuple[str, ...]] = {}
    for block in path.read_text("utf-8").split("\n## ")[1:]:
        title, _, text = block.partition("\n")
        paragraphs = []
        for paragraph in text.replace("\n- ", "\n\n").split("\n\n"):
            line = " ".join(paragraph.split())
            if line:
                paragraphs.append(line)
        parts[title.strip()] = tuple(paragraphs)
    return parts

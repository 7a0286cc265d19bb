"""The templates, style and scripts of the page, which are in the folder of this file."""

from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_HERE: Final = Path(__file__).parent
# the page fetches nothing; its styles and scripts are part of it
POLICY: Final = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
_EXPLORER: Final = (
    "explorer_parts.js",
    "explorer_data.js",
    "explorer_space.js",
    "explorer_pairs.js",
    "explorer.js",
)


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
    )


def rendered(template: str, **values: Any) -> str:
    """Return a template of this folder filled with values; text that is not Markup is escaped."""
    return _environment().get_template(template).render(**values)


@cache
def asset(name: str) -> Markup:
    """Return a style sheet or script of this folder, as it is."""
    return Markup((_HERE / name).read_text(encoding="utf-8"))


@cache
def explorer_script() -> Markup:
    """Return the scripts of the attention explorer as one, in a block that keeps names local."""
    scripts = "\n".join(map(asset, _EXPLORER))
    return Markup('"use strict";\n{\n' + scripts + "}\n")

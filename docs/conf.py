"""Settings of the documentation site, which fetches nothing: sphinx-build -W -b html docs
docs/_build/html.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from vitlens.version import __version__  # noqa: E402

project = "vitlens"
author = "the vitlens authors"
project_copyright = "the vitlens authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "docs.make.site"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "make", "pages", "parts"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # as on GitHub
smartquotes = False  # would make a dash of the two of an option
html_math_renderer = "mathml"  # made when the site is built, so no script is needed

html_theme = "furo"
html_title = "vitlens"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # a page opened from the disk may not read others
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "tango"
pygments_dark_style = "native"

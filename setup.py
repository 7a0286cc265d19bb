"""Build the package; all but its description on an index is declared in pyproject.toml.

The README links to files of the repository, as a reader there needs them. An index shows the README
alone, so that its links and images need the whole address.
"""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/vitlens/vitlens"
# the end of a Markdown link or image: "](", then a target that is neither an address nor "#..."
_IMAGE = re.compile(r"(!\[[^\]]*\]\()(?![a-z]+:|#)")
_LINK = re.compile(r"(?<!!)(\[[^\]!]*\]\()(?![a-z]+:|#)")


def with_addresses(readme: str) -> str:
    """Return a README whose relative links and images are addresses of the repository."""
    readme = _IMAGE.sub(rf"\g<1>{REPOSITORY}/raw/main/", readme)
    return _LINK.sub(rf"\g<1>{REPOSITORY}/blob/main/", readme)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=with_addresses(readme),
        long_description_content_type="text/markdown",
    )

"""Write the generated pages: python -m docs.make, in the root of a checkout."""

import sys

from docs.make.measured import UnknownNumberError
from docs.make.pages import DOCS, generated, outdated
from docs.make.parts import MissingPartError


def main() -> None:
    """Write the pages that are not current, remove those that nothing generates, and name both."""
    try:
        pages = generated()
    except (MissingPartError, UnknownNumberError) as error:
        sys.exit(f"error: {error}")
    for path in outdated(pages):
        text = pages.get(path)
        if text is None:
            (DOCS / path).unlink()
        else:
            (DOCS / path).parent.mkdir(exist_ok=True)
            (DOCS / path).write_text(text, encoding="utf-8")
        print(f"{'removed' if text is None else 'wrote'} docs/{path}")


if __name__ == "__main__":
    main()

"""The literature that registries, reports and pages cite: references.bib, read."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

FILE: Final = Path(__file__).parent / "references.bib"
_ENTRY: Final = re.compile(r"@misc\{(\w+),\n(.*?)\n\}", flags=re.DOTALL)
_FIELD: Final = re.compile(r"^  (\w+) = \{(.*)\},?$", flags=re.MULTILINE)
_NAME: Final = r"[A-Z][A-Za-zé]+(?:-[A-Z][a-z]+)?"
# One name, two names or "et al.", then a year, in parentheses or not. A number of photographs, such
# as "2000 small photographs", is no year.
_CITATION: Final = re.compile(
    rf"({_NAME})(?: (?:&|and) (?:van der )?{_NAME}| et al\.)?(?:,|'s)? "
    r"\(?((?:19|20)\d\d)\b(?! \w+ photographs)"
)


@dataclass(frozen=True)
class Work:
    """A publication.

    authors: the full names, with "others" as the last if there are more.
    title: its title.
    year: the year of publication.
    venue: the place of publication.
    subject: what it is cited for.
    arxiv: the number of its preprint, "" for none.
    """

    authors: tuple[str, ...]
    title: str
    year: str
    venue: str
    subject: str
    arxiv: str

    @property
    def surnames(self) -> tuple[str, ...]:
        """Return the authors' surnames."""
        return tuple(author.split()[-1] for author in self.authors)

    @property
    def key(self) -> tuple[str, str]:
        """Return the first author's surname and the year, which is how the work is cited."""
        return self.surnames[0], self.year

    @property
    def cited(self) -> str:
        """Return how the work is cited: "Abnar & Zuidema 2020", "Madry 2018"."""
        names = self.surnames
        if len(names) == 2 and names[1] != "others":
            return f"{names[0]} & {names[1]} {self.year}"
        return f"{names[0]} {self.year}"

    @property
    def entry(self) -> str:
        """Return the authors, the title and the place of publication."""
        authors = ", ".join(author for author in self.authors if author != "others")
        more = " and others" if self.authors[-1] == "others" else ""
        title = self.title if self.title.endswith("?") else f"{self.title}."
        arxiv = f" arXiv:{self.arxiv}" if self.arxiv else ""
        return f"{authors}{more}. {title} {self.venue}.{arxiv}"


@cache
def works() -> tuple[Work, ...]:
    """Return all publications in the order of the file."""
    results = []
    for _, text in _ENTRY.findall(FILE.read_text(encoding="utf-8")):
        fields = dict(_FIELD.findall(text))
        work = Work(
            authors=tuple(fields["author"].split(" and ")),
            title=fields["title"],
            year=fields["year"],
            venue=fields["howpublished"],
            subject=fields["keywords"],
            arxiv=fields.get("eprint", ""),
        )
        results.append(work)
    return tuple(results)


def citations(text: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of the works that a text cites.

    Citations look like "Abnar & Zuidema 2020" or "Chefer et al. (2021)".
    """
    for match in _CITATION.finditer(text):
        yield match[1], match[2]

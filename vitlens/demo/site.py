"""What all tabs share: requests of visitors, and the reports of commands that answer them."""

import math
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, TypeAlias, TypeVar, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import PAGE
from vitlens.demo.pictures import Picture
from vitlens.demo.pool import OutdatedError, Pool
from vitlens.display import for_terminal, visible
from vitlens.errors import (
    DataError,
    OutputError,
    StorageError,
    UnsupportedError,
    VitlensError,
    lacks_memory,
)
from vitlens.models.model import Model

_CLOSED: Final = "expected an open tab, found it closed while its page was computed"
AT_ONCE: Final = 32  # requests that wait for their turn, each in a thread; gradio has 40
_RECENT: Final = 16  # reports of a session that are kept: a browser may still ask for them
Component: TypeAlias = Any  # of gradio, which has no types for mypy here
Updates: TypeAlias = Mapping[Component, object]
Handler = TypeVar("Handler", bound=Callable[..., Any])
# the event of every handler that uses a model: each waits for its turn (see Pool); "multiple", as
# gradio's
# "always_last" sends the first one of several again in place of the last
EVENT: Final[Mapping[str, Any]] = {
    "api_visibility": "private",
    "concurrency_id": "models",
    "concurrency_limit": AT_ONCE,
    "show_progress": "minimal",
    "trigger_mode": "multiple",
}


_templates = Environment(
    loader=PackageLoader("vitlens.demo", ""), autoescape=True, undefined=StrictUndefined
)
_templates.filters["visible"] = visible
pieces: Final[Any] = _templates.get_template(
    "pieces.html.jinja"
).module  # macros, which give Markup


class Newest:
    """Which of one visitor's requests for each tab is the newest: an earlier one that still waits
    is not answered.

    A picture or model that a tab is to show is replaced by a later one alone, never by a click in
    the tab as it was.
    """

    def __init__(self) -> None:
        self._pictures: dict[str, int] = {}
        self._clicks: dict[str, int] = {}

    def picture(self, tab: str) -> Callable[[], bool]:
        """Return a request to show another picture or model in a tab; the function says whether it
        is still the newest.
        """
        number = self._pictures[tab] = self._pictures.get(tab, 0) + 1
        return lambda: self._pictures[tab] == number

    def click(self, tab: str) -> Callable[[], bool]:
        """Return a request of a control of a tab; the function says whether it is still the
        newest."""
        picture = self._pictures.get(tab, 0)
        number = self._clicks[tab] = self._clicks.get(tab, 0) + 1
        return lambda: self._pictures.get(tab, 0) == picture and self._clicks[tab] == number


@dataclass(frozen=True)
class Asked:
    """A request for a tab. alias: of the model; wanted: whether its answer still is; session: of
    the visitor; data: what the browser sent with it.
    """

    picture: Picture
    alias: str
    wanted: Callable[[], bool]
    session: str = ""
    data: object = None


@dataclass(frozen=True)
class Job:
    """What a report is written of. model: in its turn; name: as it was typed; run: with the place
    of the report.
    """

    model: Model
    name: str
    picture: Picture
    run: RunOptions

    def typed(self, *words: str) -> RunOptions:
        """Return the options of a run for which these words are typed in a terminal."""
        return replace(self.run, command=shlex.join(["vitlens", *words]))


Write: TypeAlias = Callable[[Job], Path | None]


@dataclass(frozen=True)
class DemoSite:
    """The models and examples of a page. place: a folder for reports, one a session, deleted at the
    end; typed: the models' names by alias, where these are not their own; words: for each head, by
    alias, where they are known.
    """

    pool: Pool
    examples: tuple[Picture, ...]
    place: Path
    typed: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, Mapping[tuple[int, int], str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Where a tab shows a report: the page itself, and its files to download."""

    shown: Component
    archive: Component
    page: Component

    @classmethod
    def placed(cls, name: str) -> "Result":
        """Put it on the page. name: of its elements."""
        import gradio

        shown = gradio.HTML(elem_id=f"{name}-result")
        with gradio.Row():
            archive = gradio.DownloadButton(
                "Report folder (zip)", visible=False, elem_id=f"{name}-archive"
            )
            page = gradio.DownloadButton(
                "Report (one HTML file)", visible=False, elem_id=f"{name}-page"
            )
        return cls(shown, archive, page)

    @property
    def components(self) -> tuple[Component, ...]:
        """Return all of it."""
        return self.shown, self.archive, self.page

    def report(self, page: Path, note: str = "") -> Updates:
        """Show a report whose folder lies beside the page as an archive; note: a sentence
        above it."""
        import gradio

        # within a frame, links to a place of the same page are else taken for links to the page
        # around it
        text = page.read_text(encoding="utf-8").replace(
            "<head>", '<head><base href="about:srcdoc">', 1
        )
        title = Markup(text.partition("<h1>")[2].partition("</h1>")[0]).striptags()
        return {
            self.shown: str(pieces.report(title, note, text)),
            self.archive: gradio.DownloadButton(value=str(page.with_suffix(".zip")), visible=True),
            self.page: gradio.DownloadButton(value=str(page), visible=True),
        }

    def nothing(self, why: str = "") -> Updates:
        """Return no report; why: a sentence, "" where others say it."""
        import gradio

        hidden = gradio.DownloadButton(visible=False)
        return {
            self.shown: str(pieces.sentence(why)) if why else "",
            self.archive: hidden,
            self.page: hidden,
        }


@dataclass(frozen=True)
class Here:
    """Where a tab is put together. tab: its name; and the components that say what is shown now:
    picture, a State of a Picture or None; alias, the chosen model; newest, a State of Newest.
    """

    site: DemoSite
    picture: Component
    alias: Component
    newest: Component
    tab: str = ""

    def on(
        self,
        listen: Callable[..., Any],
        handler: Callable[..., Updates],
        inputs: Sequence[Component],
        outputs: Sequence[Component],
    ) -> None:
        """Answer an event of a control by a handler, which is given what is asked and the values of
        the inputs.
        """
        import gradio

        @told
        def answer(
            picture: Picture | None,
            alias: str,
            newest: Newest,
            request: gradio.Request,
            event: gradio.EventData,
            *values: Any,
        ) -> Updates:
            wanted = newest.click(self.tab)
            return handler(
                Asked(required(picture), alias, wanted, str(request.session_hash), event._data),
                *values,
            )

        listen(answer, [self.picture, self.alias, self.newest, *inputs], list(outputs), **EVENT)

    def report(
        self, now: Asked, result: Result, write: Write, *, alias: str = "", note: str = ""
    ) -> Updates:
        """Write the report of a model, or the chosen one, in its turn, and show it; for a model
        that cannot have it, why. note: a sentence above it.
        """
        with self.site.pool.turn(alias or now.alias, now.wanted) as model:
            try:
                page = written(
                    self.site, model, now.picture, write, session=now.session, word=self.tab.lower()
                )
                return result.report(page, note)
            except UnsupportedError as error:
                return result.nothing(f"{error}.")
            except FileNotFoundError as error:  # between the page and its display
                raise OutdatedError(_CLOSED) from error


@dataclass(frozen=True)
class Tab:
    """One tab. name: as on the page; inputs: of which `refresh` is given the values after what is
    asked; outputs: what it may update.
    """

    name: str
    inputs: tuple[Component, ...]
    outputs: tuple[Component, ...]
    refresh: Callable[..., Updates]


def written(
    site: DemoSite, model: Model, picture: Picture, write: Write, *, session: str, word: str
) -> Path:
    """Write a report; the path of its page, with its folder as an archive beside it.

    What an error leaves behind is deleted, and so are all but the latest reports of the session.
    Raises OutdatedError where the session ended meanwhile.
    """
    own = site.place / token_of(session)
    own.mkdir(parents=True, exist_ok=True)
    for old in sorted(own.iterdir(), key=lambda path: path.stat().st_mtime)[:-_RECENT]:
        shutil.rmtree(old, ignore_errors=True)
    name = f"vitlens-{word}-{token_of(session)}"
    place = Path(mkdtemp(dir=own))
    marker = (
        place / "open"
    )  # `forget` deletes it when the tab is closed, and others may make its folder again
    marker.touch()
    try:
        typed = site.typed.get(model.alias, model.provenance.name)
        write(Job(model, typed, picture, RunOptions(out=place / name, html=True, quiet=True)))
        shutil.make_archive(str(place / name), "zip", place, name)
        page = (place / name / PAGE).rename(place / f"{name}.html")
        shutil.rmtree(place / name)
    except BaseException as error:
        is_closed = not marker.exists()
        shutil.rmtree(place, ignore_errors=True)
        if is_closed and isinstance(error, OSError | OutputError | StorageError):
            raise OutdatedError(_CLOSED) from error
        raise
    marker.unlink(missing_ok=True)
    return page


def token_of(session: str) -> str:
    """Return a session's part in the names of its files; the session cannot be told from it."""
    return sha256(session.encode()).hexdigest()[:12]


def forget(root: Path, cache: Path, session: str) -> None:
    """Delete a session's reports, and the copies of them from which a browser downloads."""
    token = token_of(session)
    shutil.rmtree(root / token, ignore_errors=True)
    for copy in cache.glob(f"*/vitlens-*-{token}.*"):
        copy.unlink(missing_ok=True)


def required(picture: Picture | None) -> Picture:
    """Return the picture. Raises DataError where none is chosen."""
    if picture is None:
        raise DataError(
            "expected a picture, found none (a session forgets it after a while); choose an "
            "example or upload one"
        )
    return picture


def words_of(error: BaseException) -> str:
    """Return the one line that a visitor reads of an error; no path of this machine is in an
    unexpected one.
    """
    if isinstance(error, VitlensError):
        return for_terminal(" ".join(str(error).split()))
    if lacks_memory(error) or type(error).__name__ == "OutOfMemoryError":
        return "expected more memory than there is; try a smaller model or picture"
    return f"unexpected {type(error).__name__}; the terminal of vitlens demo shows where"


def told(handler: Handler) -> Handler:
    """Return a handler of the page whose errors are shown as sentences; unexpected ones are printed
    in the terminal, too.

    A late answer, to a request that a newer one has replaced, changes nothing.
    """

    @wraps(handler)
    def telling(*args: Any, **kwargs: Any) -> Any:
        import gradio

        try:
            return handler(*args, **kwargs)
        except gradio.Error:
            raise
        except OutdatedError:
            return gradio.skip()
        except Exception as error:
            expected = isinstance(error, VitlensError) or lacks_memory(error)
            raise gradio.Error(
                str(escape(words_of(error))), duration=15, print_exception=not expected
            ) from error

    return cast(Handler, telling)


def open_slider(low: float, high: float, **settings: Any) -> Component:
    """Return a slider that gives any number that is typed, NaN for anything else.

    gradio's own refuses one out of range before a handler runs, and so every handler that reads the
    slider. (A class of our own is no way: gradio writes a file beside its module.)
    """
    import gradio

    slider = gradio.Slider(low, high, **settings)
    slider.preprocess = lambda payload: (
        float(payload) if isinstance(payload, int | float) else math.nan
    )
    return slider

"""Requests of visitors, and the reports of commands that answer them, for all tabs.

An event of a control arrives in `TabPlace.on`, which makes a `TabRequest` of it and calls the tab's
handler. The handler calls `TabPlace.report` with a function that writes the report of a `Job`, and
returns the updates of a `Result`.
"""

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
Updates: TypeAlias = Mapping[Component, object]  # the new value of each component
Handler = TypeVar("Handler", bound=Callable[..., Any])
# the event of every handler that uses a model: each waits for its turn (see Pool); "multiple", as
# gradio's "always_last" sends the first one of several again in place of the last
EVENT_WITH_MODEL: Final[Mapping[str, Any]] = {
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
# macros, which return Markup
pieces: Final[Any] = _templates.get_template("pieces.html.jinja").module


class Newest:
    """The newest of one visitor's requests for each tab; earlier ones that wait are not answered.

    A newer request to show a picture or model replaces pictures and clicks. A newer click replaces
    only clicks.
    """

    def __init__(self) -> None:
        # the numbers of requests so far, by tab
        self._pictures: dict[str, int] = {}
        self._clicks: dict[str, int] = {}

    def register_picture(self, tab: str) -> Callable[[], bool]:
        """Register a request to show another picture or model.

        Returns a function that returns True while the request is the newest.
        """
        number = self._pictures.get(tab, 0) + 1
        self._pictures[tab] = number
        return lambda: self._pictures[tab] == number

    def register_click(self, tab: str) -> Callable[[], bool]:
        """Register a request of a tab's control.

        Returns a function that returns True while the request is the newest.
        """
        picture = self._pictures.get(tab, 0)
        number = self._clicks.get(tab, 0) + 1
        self._clicks[tab] = number
        return lambda: self._pictures.get(tab, 0) == picture and self._clicks[tab] == number


@dataclass(frozen=True)
class TabRequest:
    """A request for a tab.

    alias: the alias of the model.
    is_current: returns True if no newer request has replaced it.
    session: the session of the visitor.
    data: the browser's message, unchecked; None without one.
    """

    picture: Picture
    alias: str
    is_current: Callable[[], bool]
    session: str = ""
    data: object = None


@dataclass(frozen=True)
class Job:
    """The subject of a report.

    name: of the model, as typed.
    run: the run options, with the report's folder.
    """

    model: Model
    name: str
    picture: Picture
    run: RunOptions

    def typed(self, *words: str) -> RunOptions:
        """Return the options of a run with these words as its command."""
        return replace(self.run, command=shlex.join(["vitlens", *words]))


# writes the report of a job into the folder of its run options; its result is not used
Write: TypeAlias = Callable[[Job], Path | None]


@dataclass(frozen=True)
class DemoSite:
    """The models and examples of a page.

    place: a folder for reports, one per session, deleted at the end.
    typed: the names of models with an alias, as typed.
    words: the labels of heads by the model's alias.
    """

    pool: Pool
    examples: tuple[Picture, ...]
    place: Path
    typed: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, Mapping[tuple[int, int], str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The components of a tab that show a report: its page, and its files to download."""

    frame: Component
    archive: Component
    page: Component

    @classmethod
    def placed(cls, name: str) -> "Result":
        """Place the components on the page; return them.

        name: the beginning of the names of their elements.
        """
        import gradio

        frame = gradio.HTML(elem_id=f"{name}-result")
        with gradio.Row():
            archive = gradio.DownloadButton(
                "Report folder (zip)", visible=False, elem_id=f"{name}-archive"
            )
            page = gradio.DownloadButton(
                "Report (one HTML file)", visible=False, elem_id=f"{name}-page"
            )
        return cls(frame, archive, page)

    @property
    def components(self) -> tuple[Component, ...]:
        """Return all components."""
        return self.frame, self.archive, self.page

    def report(self, page: Path, note: str = "") -> Updates:
        """Return updates that show a report.

        Its folder lies next to the page as an archive. note: a sentence above the report.
        """
        import gradio

        text = page.read_text(encoding="utf-8")
        # without a base, links within the page would open the page around the frame
        text = text.replace("<head>", '<head><base href="about:srcdoc">', 1)
        _, _, after_opening_tag = text.partition("<h1>")
        heading, _, _ = after_opening_tag.partition("</h1>")
        title = Markup(heading).striptags()
        return {
            self.frame: str(pieces.report(title, note, text)),
            self.archive: gradio.DownloadButton(value=str(page.with_suffix(".zip")), visible=True),
            self.page: gradio.DownloadButton(value=str(page), visible=True),
        }

    def nothing(self, reason: str = "") -> Updates:
        """Return updates that remove the report; reason: a sentence in its place."""
        import gradio

        hidden = gradio.DownloadButton(visible=False)
        return {
            self.frame: str(pieces.sentence(reason)) if reason else "",
            self.archive: hidden,
            self.page: hidden,
        }


@dataclass(frozen=True)
class TabPlace:
    """The page around a tab.

    picture: a State of the chosen Picture, or None.
    alias: the component with the chosen model.
    newest: a State of Newest.
    tab: the tab's name.
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
        """Answer a control's event.

        listen: the control's method that registers an event, e.g. `slider.release`.
        handler: takes the request and the values of the inputs.
        outputs: the components that it may update.
        """
        import gradio

        @showing_errors
        def answer(
            picture: Picture | None,
            alias: str,
            newest: Newest,
            request: gradio.Request,
            event: gradio.EventData,
            *values: Any,
        ) -> Updates:
            tab_request = TabRequest(
                picture=require_picture(picture),
                alias=alias,
                is_current=newest.register_click(self.tab),
                session=str(request.session_hash),
                data=event._data,
            )
            return handler(tab_request, *values)

        # gradio passes request and event by their annotations, the inputs in order
        listen(
            answer,
            [self.picture, self.alias, self.newest, *inputs],
            list(outputs),
            **EVENT_WITH_MODEL,
        )

    def report(
        self, request: TabRequest, result: Result, write: Write, *, alias: str = "", note: str = ""
    ) -> Updates:
        """Write a report in its turn; return updates that show it, or why there is none.

        alias: the alias of another model than the chosen one.
        note: a sentence above the report.
        """
        with self.site.pool.turn(alias or request.alias, request.is_current) as model:
            try:
                page = write_page(
                    self.site,
                    model,
                    request.picture,
                    write,
                    session=request.session,
                    word=self.tab.lower(),
                )
                return result.report(page, note)
            except UnsupportedError as error:
                return result.nothing(f"{error}.")
            except FileNotFoundError as error:  # between the page and its display
                raise OutdatedError(_CLOSED) from error


@dataclass(frozen=True)
class Tab:
    """One tab.

    name: as on the page.
    inputs: the components whose values `refresh` takes after the request.
    outputs: the components that `refresh` may update.
    refresh: called when the tab is opened, and for another picture or model.
    """

    name: str
    inputs: tuple[Component, ...]
    outputs: tuple[Component, ...]
    refresh: Callable[..., Updates]


def write_page(
    site: DemoSite, model: Model, picture: Picture, write: Write, *, session: str, word: str
) -> Path:
    """Write a report; return the path of its page, with its folder as an archive next to it.

    If writing fails, its files are deleted. All but the latest reports of the session are deleted,
    too. Raises OutdatedError if the session ended meanwhile.
    word: the beginning of the names of the files, e.g. "look".
    """
    session_folder = site.place / token_of(session)
    session_folder.mkdir(parents=True, exist_ok=True)
    by_age = sorted(session_folder.iterdir(), key=lambda path: path.stat().st_mtime)
    for old in by_age[:-_RECENT]:
        shutil.rmtree(old, ignore_errors=True)
    name = f"vitlens-{word}-{token_of(session)}"
    folder = Path(mkdtemp(dir=session_folder))
    # shows if `forget` deleted the folder meanwhile, as writing may have created it again
    marker = folder / "open"
    marker.touch()
    report_folder = folder / name
    # The archive is made while the page is in its folder. The page is then moved out of the folder,
    # and the folder deleted.
    try:
        typed_name = site.typed.get(model.alias, model.provenance.name)
        run = RunOptions(out=report_folder, html=True, quiet=True)
        write(Job(model, typed_name, picture, run))
        shutil.make_archive(str(report_folder), "zip", folder, name)
        page = (report_folder / PAGE).rename(folder / f"{name}.html")
        shutil.rmtree(report_folder)
    except BaseException as error:  # also Ctrl-C and a deadline
        is_closed = not marker.exists()
        shutil.rmtree(folder, ignore_errors=True)
        if is_closed and isinstance(error, OSError | OutputError | StorageError):
            raise OutdatedError(_CLOSED) from error
        raise
    marker.unlink(missing_ok=True)
    return page


def token_of(session: str) -> str:
    """Return a session's part in the names of its files, which does not reveal the session."""
    return sha256(session.encode()).hexdigest()[:12]


def forget(root: Path, cache: Path, session: str) -> None:
    """Delete a session's reports, and the copies of them from which a browser downloads."""
    token = token_of(session)  # as `write_page` names them
    shutil.rmtree(root / token, ignore_errors=True)
    for copy in cache.glob(f"*/vitlens-*-{token}.*"):
        copy.unlink(missing_ok=True)


def require_picture(picture: Picture | None) -> Picture:
    """Return the picture. Raises DataError if none is chosen."""
    if picture is None:
        raise DataError(
            "expected a picture, found none (a session forgets it after a while); choose an "
            "example or upload one"
        )
    return picture


def message_for_visitors(error: BaseException) -> str:
    """Return an error's message to visitors, without a path of this machine if unexpected."""
    if isinstance(error, VitlensError):
        return for_terminal(" ".join(str(error).split()))
    if lacks_memory(error) or type(error).__name__ == "OutOfMemoryError":
        return "expected more memory than there is; try a smaller model or picture"
    return f"unexpected {type(error).__name__}; the terminal of vitlens demo shows where"


def showing_errors(handler: Handler) -> Handler:
    """Return a handler of the page that shows its errors as sentences.

    Unexpected errors are printed in the terminal, too. An outdated request changes nothing.
    """

    @wraps(handler)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        import gradio

        try:
            return handler(*args, **kwargs)
        except gradio.Error:  # of an inner handler, already in words
            raise
        except OutdatedError:
            return gradio.skip()
        except Exception as error:
            is_expected = isinstance(error, VitlensError) or lacks_memory(error)
            raise gradio.Error(
                str(escape(message_for_visitors(error))),
                duration=15,  # seconds
                print_exception=not is_expected,
            ) from error

    return cast(Handler, wrapped)


def open_slider(low: float, high: float, **settings: Any) -> Component:
    """Return a slider that returns any typed number, NaN for anything else.

    gradio's slider refuses a number out of range before a handler runs, and so every handler that
    reads the slider. (A subclass is no way: gradio writes a file next to its module.)
    """
    import gradio

    def read_number(payload: object) -> float:
        return float(payload) if isinstance(payload, int | float) else math.nan

    slider = gradio.Slider(low, high, **settings)
    slider.preprocess = read_number
    return slider

"""Errors as sentences on the page: one line each, as on the command line."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from markupsafe import escape

from vitlens.demo.pool import OutdatedError
from vitlens.display import for_terminal
from vitlens.errors import VitlensError, lacks_memory

Handler = TypeVar("Handler", bound=Callable[..., Any])


def words_of(error: BaseException) -> str:
    """The one line that a visitor reads of an error; no path of this machine is in an unexpected one."""
    if isinstance(error, VitlensError):
        return for_terminal(" ".join(str(error).split()))
    if lacks_memory(error) or type(error).__name__ == "OutOfMemoryError":
        return "expected more memory than there is; try a smaller model or picture"
    return f"unexpected {type(error).__name__}; the terminal of vitlens demo shows where"


def told(handler: Handler) -> Handler:
    """A handler of the page whose errors are shown as sentences; unexpected ones are printed in the terminal, too.

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
            raise gradio.Error(str(escape(words_of(error))), duration=15, print_exception=not expected) from error

    return cast(Handler, telling)

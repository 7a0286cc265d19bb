"""Serves the page of `vitlens demo` until it is stopped: on loopback alone, without telemetry and
without sharing.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from vitlens.commands.run.load import load_models
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress import announced, phase
from vitlens.data.decode import quiet_pillow
from vitlens.demo.intervene import switches_of, words_of, write_intervened
from vitlens.demo.options import DemoOptions
from vitlens.demo.pictures import UPLOAD_BYTES, Picture, examples
from vitlens.demo.pool import Pool
from vitlens.demo.site import DemoSite, written
from vitlens.demo.tabs import write_look
from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.names import DIGITS_PAIR

HOST: Final = "127.0.0.1"
VISITORS: Final = 64  # requests that wait at a time
_LEAST: Final = (
    6,
    19,
)  # gradio: earlier ones fetch fonts from the network and place clicks wrongly
_SILENT: Final = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_SSR_MODE": "False",
}


def measure(options: DemoOptions) -> None:
    """Serve the page until Ctrl-C; its address is printed on stdout.

    Raises ModelError without the extra demo, InputError for a port that is taken, UnsupportedError
    for a model without a classifier.
    """
    with suppress(KeyboardInterrupt), serving(options) as address:
        print(address, flush=True)  # noqa: T201
        print("Ctrl-C ends it", file=sys.stderr)  # noqa: T201
        threading.Event().wait()


@contextmanager
def serving(options: DemoOptions) -> Iterator[str]:
    """Inside, the page is served; yields its address. All its files are deleted on exit.

    Raises ModelError without the extra, InputError for a port that is taken, and what loading
    models and images raises.
    """
    require_extra()
    names = options.models or DIGITS_PAIR
    line = f"loading and checking {', '.join(names)}; the page is ready in about a minute"
    print(line, file=sys.stderr)  # noqa: T201
    with announced("vitlens demo"):
        models = load_models(
            names,
            command="demo",
            model_options=options.model_options,
            options=RunOptions(device=options.device),
        )
        pool = Pool(models)
        with quiet_pillow():
            shown = examples(options.images, models)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # ends the page as Ctrl-C does: its files are deleted
    with ExitStack() as stack:
        root = Path(
            stack.enter_context(
                TemporaryDirectory(prefix="vitlens-demo-", ignore_cleanup_errors=True)
            )
        )
        cache = root / "cache"
        os.environ.update(
            {**_SILENT, "GRADIO_TEMP_DIR": str(cache)}
        )  # read when gradio is imported
        stack.enter_context(quiet_pillow())
        with announced("vitlens demo"):
            with phase("Importing gradio"):
                from vitlens.demo.page import build

            typed = dict(zip((model.alias for model in models), names))
            words = {model.alias: words_of(model, shown) for model in models}
            site = DemoSite(pool, shown, root / "reports", typed, words)
            if shown:
                with phase("A first look with every model"):
                    warm_up(site, shown[0])
            with phase("Building the page"):
                page = build(site, cache)
                stack.callback(page.close, verbose=False)
                address = _launched(page, options)
        yield address


def require_extra() -> None:
    """Raise ModelError, with the command that installs it, where gradio is missing or too old."""
    try:
        found = version("gradio")
        recent = tuple(int(part) for part in found.split(".")[:2]) >= _LEAST
    except (PackageNotFoundError, ValueError):
        found = "none"
        recent = False
    if not recent:
        raise ModelError(
            f"expected gradio {_LEAST[0]}.{_LEAST[1]} or newer for vitlens demo, found {found}; "
            "type pip install 'vitlens[demo]'"
        )


def warm_up(site: DemoSite, picture: Picture) -> None:
    """Look at a picture with every model, and switch a head off: the lens and replay check
    themselves once, before anyone is served and without a limit on time.
    """
    for model in site.pool.models:
        written(site, model, picture, write_look, session="", word="look")
        with suppress(UnsupportedError):
            heads = switches_of(model).heads[:1]
            written(
                site,
                model,
                picture,
                partial(write_intervened, off={"heads": heads}),
                session="",
                word="intervene",
            )


def _launched(page: Any, options: DemoOptions) -> str:
    """Start the server; its address."""
    import gradio

    page.queue(max_size=VISITORS, api_open=False)
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    try:
        _, address, _ = page.launch(
            server_name=HOST,
            server_port=options.port,
            inbrowser=options.browser,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            mcp_server=False,
            enable_monitoring=False,
            max_file_size=UPLOAD_BYTES,
            footer_links=[],
            theme=gradio.themes.Default(
                font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
            ),
            head=f"<style>{style}</style>",  # gradio's css= puts a prefix before every rule
        )
    except OSError as error:
        where = (
            f"a free port for --port {options.port}"
            if options.port
            else "a free port from 7860 to 7959"
        )
        raise InputError(
            f"expected {where}, found it taken; leave --port out, or choose another"
        ) from error
    return str(address)

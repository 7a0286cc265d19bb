"""Serves the page of `vitlens demo` on loopback only, without telemetry and without sharing."""

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

from vitlens.commands.run.load import load_models, require_image_paths
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress import announced, phase
from vitlens.data.decode import quiet_pillow
from vitlens.demo.intervene import switches_of, words_of, write_intervened
from vitlens.demo.options import DemoOptions
from vitlens.demo.pictures import UPLOAD_BYTES, Picture, examples
from vitlens.demo.pool import Pool
from vitlens.demo.site import DemoSite, write_page
from vitlens.demo.tabs import write_look
from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.names import DIGITS_PAIR

HOST: Final = "127.0.0.1"
VISITORS: Final = 64  # requests that wait at a time
# earlier versions of gradio fetch fonts from the network and place clicks wrongly
_OLDEST: Final = (6, 19)
# variables of the environment that stop telemetry, and a second server for the first page
_ENVIRONMENT: Final = {
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
        threading.Event().wait()  # for ever: nothing sets it


@contextmanager
def serving(options: DemoOptions) -> Iterator[str]:
    """Serve the page inside; yield its address. All its files are deleted on exit.

    Raises ModelError without the extra, InputError for a port that is taken, and what loading
    models and images raises.
    """
    require_extra()
    require_image_paths(options.images)
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
            example_pictures = examples(options.images, models)
    # SIGTERM ends the page as Ctrl-C does, so that its files are deleted
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # it leaves in reverse order: the page is closed, then files are deleted
    with ExitStack() as stack:
        temporary = TemporaryDirectory(prefix="vitlens-demo-", ignore_cleanup_errors=True)
        root = Path(stack.enter_context(temporary))
        cache = root / "cache"
        # read when gradio is imported
        os.environ.update({**_ENVIRONMENT, "GRADIO_TEMP_DIR": str(cache)})
        stack.enter_context(quiet_pillow())
        with announced("vitlens demo"):
            with phase("Importing gradio"):
                from vitlens.demo.page import build

            typed_names = {}
            words = {}
            for model, name in zip(models, names):
                typed_names[model.alias] = name
                words[model.alias] = words_of(model, example_pictures)
            site = DemoSite(
                pool, example_pictures, root / "reports", typed=typed_names, words=words
            )
            if example_pictures:
                with phase("A first look with every model"):
                    warm_up(site, example_pictures[0])
            with phase("Building the page"):
                page = build(site, cache)
                stack.callback(page.close, verbose=False)
                address = _launch(page, options)
        yield address


def require_extra() -> None:
    """Raise ModelError, with the command that installs it, if gradio is missing or too old."""
    installed = "none"
    is_recent = False
    # not installed, or a version that is no number
    with suppress(PackageNotFoundError, ValueError):
        installed = version("gradio")
        major_and_minor = tuple(int(number) for number in installed.split(".")[:2])
        is_recent = major_and_minor >= _OLDEST
    if not is_recent:
        raise ModelError(
            f"expected gradio {_OLDEST[0]}.{_OLDEST[1]} or newer for vitlens demo, found "
            f"{installed}; type pip install 'vitlens[demo]'"
        )


def warm_up(site: DemoSite, picture: Picture) -> None:
    """Look at a picture with every model, and switch a head off.

    The lens and replay check themselves once: here, before any visitor and without a limit on time.
    """
    for model in site.pool.models:
        write_page(site, model, picture, write_look, session="", word="look")
        # a model without heads cannot switch any off
        with suppress(UnsupportedError):
            heads = switches_of(model).heads[:1]
            write = partial(write_intervened, off={"heads": heads})
            write_page(site, model, picture, write, session="", word="intervene")


def _launch(page: Any, options: DemoOptions) -> str:
    """Start the server; return its address."""
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
        expected = "a free port from 7860 to 7959"
        if options.port:
            expected = f"a free port for --port {options.port}"
        raise InputError(
            f"expected {expected}, found it taken; leave --port out, or choose another"
        ) from error
    return str(address)

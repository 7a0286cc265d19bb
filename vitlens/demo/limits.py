"""What one visitor of the page may ask for, so that a machine serves several; the page says it."""

from typing import Final

from vitlens.data.decode import PIXEL_LIMIT

UPLOAD_BYTES: Final = 20_000_000  # of one file
PASSES: Final = 100  # passes of the model that one map or one attack takes; slower ones are for the command line
POINTS: Final = 20_000  # in the view in space: more make a browser's WebGL slow
WAITING: Final = 90.0  # seconds that a request waits for its model
RUNNING: Final = 60.0  # seconds that a request then computes; it is stopped at the next block of the model, or figure
VISITORS: Final = 64  # requests that wait at a time
AT_ONCE: Final = 32  # of these, requests that wait for a model, each in a thread; gradio has 40
EXAMPLES: Final = 24
KEPT: Final = 1800  # seconds after the last change for which a session's images are kept in memory


def limit_words() -> str:
    """The limits in a few sentences."""
    return (
        f"Limits: files of at most {UPLOAD_BYTES // 1_000_000} MB and {PIXEL_LIMIT // 1_000_000} megapixels, the first "
        f"frame of an animation, maps and attacks of at most {PASSES} passes of the model. Each model answers one "
        f"visitor at a time: a request waits for at most {WAITING:.0f} s, and is stopped after {RUNNING:.0f} s of "
        "computing. What you upload is read once and its file deleted at once; the "
        f"pixels stay in memory for this session, at most {KEPT // 60} minutes after its last change, and an exported "
        "report until its tab is closed."
    )

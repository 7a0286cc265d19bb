"""Levels of disturbances in words."""


def level_words(kind: str, level: float) -> str:
    """A level as on a figure's axis."""
    if kind == "shuffle":
        return f"{level:.0f}"
    if kind == "low-pass" and level > 1.4:
        return "all"
    return f"{100 * level:.0f}"

"""Large counts with a unit prefix; free of matplotlib, so that reports can use it, too."""


def in_thousands(count: int | float) -> str:
    """A count as "2.69 M": three digits and the prefix of the unit that follows."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {prefix}"
    return f"{count:.3g} "

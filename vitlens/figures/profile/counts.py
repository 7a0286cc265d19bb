"""Large counts with the prefix of their unit; free of matplotlib, so that reports can say them, too."""


def in_thousands(count: int | float) -> str:
    """ "2.69 M": three digits and the prefix of the unit that follows."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {prefix}"
    return f"{count:.3g} "

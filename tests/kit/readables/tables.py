"""Tables of labels, by example."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.kit.readables.example import Example, picture


def _labelled(
    text: str | bytes, *, names: tuple[str, str, str] = ("a", "b", "c")
) -> Callable[[Path], Path]:
    """Return a function that writes images a.png (a cat), b.png and c.png (dogs), and a table.

    names: other names than a, b and c.
    """

    def make(root: Path) -> Path:
        folder = root / "flat"
        for place, name in zip(names, ("cat", "dog", "dog")):
            picture(folder / f"{place}.png", name)
        table = root / "labels.csv"
        table.write_bytes(text if isinstance(text, bytes) else text.encode())
        return table

    return make


TABLES: Final = (
    Example(
        "a line of titles, commas",
        _labelled("file,label\na.png,cat\nb.png,dog\nc.png,dog\n"),
        "read",
        "names",
    ),
    Example("no titles", _labelled("a.png,cat\nb.png,dog\nc.png,dog\n"), "read", "names"),
    Example(
        "labels first", _labelled("label,file\ncat,a.png\ndog,b.png\ndog,c.png\n"), "read", "names"
    ),
    Example(
        "semicolons, a byte order mark, quotes",
        _labelled('\ufeff"file";"label"\n"a.png";"cat"\nb.png;dog\nc.png;dog'),
        "read",
        "names",
    ),
    Example(
        "tabs, in UTF-16",
        _labelled("file\tlabel\na.png\tcat\nb.png\tdog\nc.png\tdog\n".encode("utf-16")),
        "read",
        "names",
    ),
    Example("blanks", _labelled("a.png cat\nb.png dog\nc.png dog\n"), "read", "names"),
    Example("names without suffix", _labelled("id,class\na,cat\nb,dog\nc,dog\n"), "read", "names"),
    Example(
        "paths",
        _labelled(
            "file,label\n/data/a.png,cat\nflat\\b.png,dog\nx/c.png,dog\n", names=("a", "b", "x/c")
        ),
        "read",
        "the last parts of a path count",
    ),
    Example(
        "further columns beside one that is called label",
        _labelled("id,age,label\na,3,cat\nb,4,dog\nc,5,dog\n"),
        "read",
        "names",
    ),
    Example(
        "wnids, with boxes as Kaggle's ImageNet",
        _labelled(
            "ImageId,PredictionString\na,n01440764 1 2 3 4 \nb,n01443537 1 2 3 4 \nc,n01443537 5 6 "
            "7 8\n"
        ),
        "read",
        "ImageNet's names",
    ),
    Example(
        "a column called split, of test and val",
        _labelled("file,label,split\na.png,cat,test\nb.png,dog,Test\nc.png,dog,val\n"),
        "read, with a note",
        "the parts",
    ),
    Example(
        "a column called part, of other words",
        _labelled("file,part,label\na.png,left,cat\nb.png,right,dog\nc.png,right,dog\n"),
        "read",
        "a further column",
    ),
    Example(
        "a column called partition, of other words",
        _labelled("file,label,partition\na.png,cat,left\nb.png,dog,right\nc.png,dog,right\n"),
        "refused",
        "train, val or test",
    ),
    Example(
        "class indices",
        _labelled("file,label\na.png,0\nb.png,1\nc.png,1.0\n"),
        "read",
        "indices from 0",
    ),
    Example(
        "indices that count from 1",
        _labelled("file,label\na.png,1\nb.png,2\nc.png,2\n"),
        "read, with a note",
        "indices from 0, as they are",
    ),
    Example(
        "labels first, with files that are called 0.png, 1.png, 2.png",
        _labelled("label,id\n1,2\n1,1\n0,0\n", names=("0", "1", "2")),
        "read",
        "the column that is not called label has the files",
    ),
    Example(
        "class indices that are also names of images without their suffix",
        _labelled("file,label\n0.png,0\n1.png,1\n2.png,1\n9.png,2\n", names=("0", "1", "2")),
        "read, with a note",
        "the column that is not called label has the files",
    ),
    Example(
        "the same without titles",
        _labelled("0.png,0\n1.png,1\n2.png,1\n9.png,2\n", names=("0", "1", "2")),
        "read, with a note",
        "the column of names with a suffix has the files",
    ),
    Example(
        "class indices that are names of images, and no other name of an image",
        _labelled("file,label\nz.png,1\n", names=("0", "1", "2")),
        "refused",
        "check the names",
    ),
    Example(
        "numbers of images, after other numbers that are names of images again and again",
        _labelled("digit,nr\n0,0\n1,1\n1,2\n2,7\n0,8\n1,9\n", names=("0", "1", "2")),
        "read, with a note",
        "the column that names each image once has the files",
    ),
    Example(
        "the same of as many images, by their title",
        _labelled("digit,id\n1,1\n1,2\n0,0\n", names=("0", "1", "2")),
        "read",
        "the column that names each image once has the files",
    ),
    Example(
        "a column called image, next to a number that is a name of images",
        _labelled("code,image\n0,0\n1,1\n1,2\n", names=("0", "1", "2")),
        "read",
        "the column that is called image has the files",
    ),
    Example(
        "names of other files, without titles, and class indices that are names of images",
        _labelled("x.png,0\ny.png,1\nz.png,2\n", names=("0", "1", "2")),
        "refused",
        "check the names",
    ),
    Example(
        "names of files with accents in one character or two",
        _labelled(
            "file,label\ne\u0301.png,cat\n\u00ea.png,dog\n\u00fc.png,dog\n",
            names=("\u00e9", "\u00ea", "\u00fc"),
        ),
        "read",
        "names",
    ),
    Example(
        "lines that end as on an old Mac",
        _labelled("file,label\ra.png,cat\rb.png,dog\rc.png,dog\r"),
        "read",
        "names",
    ),
    Example(
        "images without a line, lines without an image",
        _labelled("a.png,cat\nb.png,dog\nz.png,dog\n"),
        "read, with a note",
        "left out and counted",
    ),
    Example(
        "an empty label, or NaN",
        _labelled("file,label\na.png,nan\nb.png,dog\n"),
        "refused",
        "leave the line out",
    ),
    Example(
        "two labels for one image", _labelled("a.png,cat\na.png,dog\n"), "refused", "leave one out"
    ),
    Example(
        "the name of several images",
        _labelled("file,label\nb.png,cat\n", names=("x/b", "y/b", "c")),
        "refused",
        "their paths",
    ),
    Example(
        "commas in a name without quotes",
        _labelled("file,label\na.png,cat, grey\nb.png,dog\nc.png,dog\n"),
        "refused",
        "quotes",
    ),
    Example(
        "negative or fractional numbers",
        _labelled("a.png,-1\nb.png,0.5\n"),
        "refused",
        "indices or names",
    ),
    Example("one column", _labelled("490\n361\n171\n"), "refused", "FILE,LABEL lines"),
    Example(
        "one column a class (one-hot)",
        _labelled("image,cat,dog\na,1,0\nb,0,1\nc,0,1\n"),
        "refused",
        "one column of labels",
    ),
    Example(
        "no name that is an image's",
        _labelled("file,label\nz.png,cat\n"),
        "refused",
        "check the names",
    ),
    Example("bytes that are no text", _labelled(b"\xff\xfe\x00"), "refused", "save it as UTF-8"),
    Example("an empty file", _labelled(""), "refused", "FILE,LABEL lines"),
    Example("only empty lines", _labelled("\n" * 300), "refused", "FILE,LABEL lines"),
    Example(
        "empty lines before the others",
        _labelled("\n" * 300 + "file,label\na.png,cat\nb.png,dog\nc.png,dog\n"),
        "read",
        "names",
    ),
    Example(
        "quotes that are never closed",
        _labelled('file,label\na.png,"cat\n' + "b.png,dog\n" * 20_000),
        "refused",
        "close its quotes",
    ),
)

"""Messages name options of the command line, or arguments of Python."""

from vitlens.errors import argument, typed_flags


def test_commands_that_end_in_another_order_than_they_began_leave_python_its_names():
    """As in threads: the first command ends while the second runs."""
    first = typed_flags()
    second = typed_flags()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert argument("image_size", 64) == "--image-size 64"
    second.__exit__(None, None, None)
    assert argument("image_size", 64) == "image_size=64"

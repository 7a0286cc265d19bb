import pytest

from vitlens.errors import InputError
from vitlens.safe_paths import inside, require_no_links


@pytest.mark.parametrize(
    "parts", [("..",), ("a", "../../x"), ("/etc",), ("a", "/etc"), (), (".",), ("a\0",), ("x" * 300,)]
)
def test_no_place_outside(tmp_path, parts):
    with pytest.raises(InputError):
        inside(tmp_path, *parts)


def test_links_are_refused_on_the_way_and_at_the_end(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    (run / "arrays").mkdir(parents=True)
    other.mkdir()
    (other / "a.png").write_text("mine")
    (run / "figures").symlink_to(other)
    (run / "arrays" / "x.npz").symlink_to(other / "a.png")
    (run / "report.md").symlink_to(tmp_path / "nowhere")
    for parts in (("figures", "a.png"), ("arrays", "x.npz"), ("report.md",)):
        with pytest.raises(InputError, match="no link"):
            inside(run, *parts)
        with pytest.raises(InputError, match="no link"):
            require_no_links(run, parts[:1])
    assert inside(run, "arrays", "y.npz") == run / "arrays" / "y.npz"
    require_no_links(run, ("config.json",))


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    assert inside(tmp_path / "latest", "report.md") == tmp_path / "latest" / "report.md"

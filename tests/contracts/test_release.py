"""What is released: the version is one, and the wheel works without the repository."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import vitlens

ROOT = Path(__file__).parents[2]
CONSUMER = Path(__file__).with_name("consumer.py")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_IN_WHEEL = {"vitlens/models/bundled/README.md"}
# of the source distribution: what is made, beside the committed files
MADE = re.compile(r"PKG-INFO|setup\.cfg|vitlens\.egg-info/.*")
LARGEST_SDIST = 10_000_000
BUILD = """
import sys
from setuptools.build_meta import build_sdist, build_wheel
print((build_wheel if sys.argv[1] == "wheel" else build_sdist)(sys.argv[2]))
"""


def committed(*folders: str) -> set[str]:
    """Return the files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *folders]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listing.split("\0") if name and (ROOT / name).is_file()}


def run(*line: object, folder: Path) -> str:
    """Return what a program prints in a folder, without this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Build both distributions, the wheel from the other, and install it with the libraries of the
    tests.
    """
    checkout = tmp_path_factory.mktemp("checkout")
    for name in committed():
        if not name.startswith(("reports/", "tests/", "benchmarks/", "docs/")):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    folder = tmp_path_factory.mktemp("release")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", *SETTINGS["build-system"]["requires"], folder=folder)
    run(python, "-c", BUILD, "sdist", folder, folder=checkout)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(python, "-c", BUILD, "wheel", folder, folder=folder / sdist.name.removesuffix(".tar.gz"))
    [wheel] = folder.glob("*.whl")
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, folder=folder)
    [packages] = (folder / "venv").glob("lib/*/site-packages")
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries))
    return SimpleNamespace(python=python, sdist=sdist, wheel=wheel, packages=packages)


def test_the_citation_and_the_change_log_name_the_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", vitlens.__version__)
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [vitlens.__version__]
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == vitlens.__version__


def test_the_program_of_a_user_that_is_type_checked_has_every_public_name():
    text = CONSUMER.read_text()
    unused = {name for name in vitlens.__all__ if not re.search(rf"\b{name}\b", text)}
    assert unused == set()
    assert str(CONSUMER.relative_to(ROOT)) in SETTINGS["tool"]["mypy"]["files"]


def test_every_module_is_in_a_package_that_a_wheel_takes():
    folders = {Path(name).parent for name in committed("vitlens") if name.endswith(".py")}
    assert not [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()]


def links_of(readme: str) -> list[str]:
    """Return the targets of its links and images, without those inside the page."""
    return re.findall(r"\]\(([^#)][^)]*)\)", readme)


def test_the_links_of_the_readme_are_addresses_of_files_of_the_repository_on_an_index():
    setup = runpy.run_path(str(ROOT / "setup.py"))
    readme = (ROOT / "README.md").read_text()
    address = re.compile(rf"{re.escape(setup['REPOSITORY'])}/(raw|blob)/main/([^#]+)(?:#.*)?")
    images = 0
    for target in links_of(setup["with_addresses"](readme)):
        match = address.fullmatch(target)
        assert match is not None, target
        kind, name = match.groups()
        assert name in committed(name)
        assert (kind == "raw") == (Path(name).suffix == ".png"), "an image needs the raw file"
        images += kind == "raw"
    assert images == len(re.findall(r"!\[", readme)) > 0


@pytest.mark.slow
def test_the_description_of_the_wheel_has_no_relative_links(release):
    with zipfile.ZipFile(release.wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        description = archive.read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in description
    targets = links_of(description)
    assert targets
    assert all(target.startswith("https://") for target in targets)


@pytest.mark.slow
def test_the_wheel_has_the_files_of_the_package_and_the_source_distribution_is_light(release):
    with zipfile.ZipFile(release.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == committed("vitlens") - NOT_IN_WHEEL
    assert release.sdist.stat().st_size < LARGEST_SDIST
    with tarfile.open(release.sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    files = {name for name in files if name and not MADE.fullmatch(name)}
    others = {name for name in files if not name.startswith("vitlens")}
    assert others >= {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md"}
    assert {name.partition("/")[0] for name in others} == others  # no folder but the package


@pytest.mark.slow
def test_the_installed_wheel_runs_a_bundled_model_outside_a_checkout(release, tmp_path):
    place = run(release.python, "-c", "import vitlens; print(vitlens.__file__)", folder=tmp_path)
    assert Path(place.strip()).is_relative_to(release.packages)
    command = release.python.with_name("vitlens")
    assert run(command, "--version", folder=tmp_path) == f"vitlens {vitlens.__version__}\n"
    for model in ("vit-digits", "cnn-shortcut"):
        line = [command, "predict", model, "--limit", "2", "--html", "--out", model]
        run(*line, folder=tmp_path)
        assert (tmp_path / model / "report.html").is_file()


@pytest.mark.slow
def test_the_program_of_a_user_passes_strict_types_against_the_wheel(release, tmp_path):
    shutil.copy(CONSUMER, tmp_path / "program.py")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n")
    line = [sys.executable, "-m", "mypy", "--python-executable", release.python]
    assert "Success" in run(*line, "program.py", folder=tmp_path)
    (tmp_path / "wrong.py").write_text("import vitlens\nmodel: int = vitlens.load('vit-digits')\n")
    with pytest.raises(AssertionError, match="Incompatible types in assignment"):
        run(*line, "wrong.py", folder=tmp_path)

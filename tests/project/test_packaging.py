"""The content of the wheel and of the sdist."""

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["cli", "configs", "daemon", "jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def files_below(folder):
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    # By way of the sdist, as a release is built: backends drop linked folders there in silence.
    folder = tmp_path_factory.mktemp("dist")
    cmd = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(cmd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_source_folder_is_linked_into_the_import_package(folder):
    link = ROOT / "src" / "warmd" / folder
    assert link.resolve() == ROOT / folder, f"make it with: ln -s ../../{folder} {link}"


@pytest.mark.slow
def test_wheel_holds_every_source_file_config_and_model(built):
    shipped = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    sources = {f"warmd/{name}" for folder in FOLDERS for name in files_below(folder)}
    assert sources <= shipped
    assert any(name.endswith("/licenses/LICENSE") for name in shipped)
    assert not [name for name in shipped if not name.startswith("warmd")]


@pytest.mark.slow
def test_sdist_holds_what_building_and_testing_need(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "constraints.txt", ".ci/constraints-lowest.txt"}
    needed |= {"Makefile", "README.md", "LICENSE"}
    for folder in [*FOLDERS, "tests", "deploy", "docs"]:
        needed |= files_below(folder)
    assert needed <= shipped
    assert not [name for name in shipped if "__pycache__" in name]


def test_every_dependency_is_pinned_to_one_version():
    pins = (ROOT / "constraints.txt").read_text()
    pinned = names(re.findall(r"^[\w.-]+==[\w.]+$", pins, re.MULTILINE))
    assert names(PROJECT["dependencies"]) <= pinned
    assert names(PROJECT["optional-dependencies"]["dev"]) <= pinned


@pytest.mark.slow
def test_sources_import_declared_dependencies_only():
    files = (ROOT / name for folder in FOLDERS for name in files_below(folder))
    nodes = [n for f in files if f.suffix == ".py" for n in ast.walk(ast.parse(f.read_text()))]
    imported = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    imported |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and not n.level}
    foreign = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    distributions = names({"yaml": "pyyaml", "PIL": "pillow"}.get(name, name) for name in foreign)
    extras = PROJECT["optional-dependencies"]
    optional = names(extras["plot"]) | names(extras["optuna"])
    for extra in ("agents", "apprise", "s3", "gguf", "mcp"):
        optional |= names(extras[extra])
    assert distributions <= names(PROJECT["dependencies"]) | optional


def names(requirements):
    return {re.split(r"[<>=!~; ]", line)[0].lower().replace("_", "-") for line in requirements}


def test_cli_starts_without_the_heavy_libraries():
    heavy = {"torch", "transformers", "trl"}
    code = f"import sys, warmd.cli.main; print(*{heavy!r} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []

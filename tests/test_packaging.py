"""What is shipped, and what an import loads."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import shardwright

ROOT = Path(__file__).parents[1]
LAYERS = ("ir", "passes", "runtime", "planner")
HEAVY = ("torch", "ortools", "transformers")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from the sources at hand without their build leftovers."""
    out = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source") / "tree"
    _copy_sources(source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def _copy_sources(target: Path) -> None:
    """What git would hand out: the four folders, and `src` with its links."""
    import shutil

    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
    for name in (*LAYERS, "src"):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)


def _data_and_modules() -> set[str]:
    """Files that an installation needs, relative to the package."""
    found = [p for layer in LAYERS for p in (ROOT / layer).rglob("*") if p.suffix in (".py", ".lark", ".toml")]
    return {p.relative_to(ROOT).as_posix() for p in found} | {"__init__.py", "py.typed"}


def test_wheel_has_every_file_of_all_layers_and_no_link(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        infos = {info.filename: info for info in archive.infolist()}
    missing = {f"shardwright/{name}" for name in _data_and_modules()} - set(infos)
    assert not missing
    links = [name for name, info in infos.items() if info.external_attr >> 28 == 0xA]
    assert not links
    assert {"shardwright/ir/grammar.lark"} <= set(infos)
    assert [name for name in infos if name.startswith("shardwright/ir/presets/") and name.endswith(".toml")]


def test_wheel_installs_nothing_but_shardwright(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        points = archive.read(entry).decode()
    assert {top for top in tops if not top.endswith(".dist-info")} == {"shardwright"}
    assert "shardwright = shardwright.planner.cli:main" in points


def test_wheel_works_where_it_is_unpacked(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import shardwright, shardwright.ir, shardwright.planner.cli\n"
        f"assert shardwright.ir.__file__.startswith({str(tmp_path)!r}), shardwright.ir.__file__\n"
        "print(shardwright.ir.load_cluster('cpu:2').num_ranks)"
    )
    assert _python(code, cwd=tmp_path).strip() == "2"


def test_sdist_has_real_files(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    for name in _data_and_modules():
        member = members.get(f"src/shardwright/{name}")
        assert member is not None, name
        assert member.isfile(), name


def _python(code: str, cwd: Path | None = None) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd or ROOT / "tests")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    ["shardwright", "shardwright.ir", "shardwright.passes", "shardwright.planner.cli", "shardwright.planner.show"],
)
def test_import_loads_neither_torch_nor_the_solver(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert _python(code).strip() == "[]"


def test_no_module_of_ir_or_passes_loads_torch_or_the_solver() -> None:
    names = [f"shardwright.{p.parent.name}.{p.stem}" for layer in ("ir", "passes") for p in (ROOT / layer).glob("*.py")]
    names = [name for name in names if not name.endswith("__init__")]
    code = f"import sys, {', '.join(names)}; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert _python(code).strip() == "[]"


def test_runtime_loads_no_solver() -> None:
    names = [f"shardwright.runtime.{p.stem}" for p in (ROOT / "runtime").glob("*.py") if p.stem != "__init__"]
    code = f"import sys, {', '.join(names)}; print([m for m in sys.modules if m.startswith(('ortools', 'shardwright.planner'))])"  # noqa: E501
    assert _python(code).strip() == "[]"


@pytest.mark.parametrize("name", shardwright.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(shardwright, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        shardwright.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_layers_are_links_to_the_folders_at_the_top() -> None:
    for layer in LAYERS:
        link = ROOT / "src" / "shardwright" / layer
        assert link.is_symlink(), f"{link} is not a link: the checkout has lost symlinks"
        assert link.resolve() == ROOT / layer


def test_layer_contracts_are_declared_and_kept() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert layers == [["planner", "runtime", "passes", "ir"]]
    forbidden = {m for contract in contracts if contract["type"] == "forbidden" for m in contract["forbidden_modules"]}
    assert {"torch", "ortools"} <= forbidden
    assert "acyclic_siblings" in {contract["type"] for contract in contracts}
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_every_module_lists_its_public_names() -> None:
    missing = [
        path.relative_to(ROOT).as_posix()
        for layer in LAYERS
        for path in (ROOT / layer).glob("*.py")
        if path.name != "__init__.py" and "__all__" not in path.read_text()
    ]
    assert not missing

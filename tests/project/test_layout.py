"""The import rules: the packages that each package may import, without cycles."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = ("cli", "configs", "daemon", "jobs")
KINDS = ("jobs.grpo", "jobs.mlm", "jobs.sft", "jobs.dpo", "jobs.infer", "jobs.encode", "jobs.eval")
CONTRACT = ("jobs.spec", "jobs.relations", "jobs.context", "jobs.errors")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path for top in TOP for path in sorted((ROOT / top).rglob("*.py"))}


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported."""
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not is_for_types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from outside_functions(child)


def imports_of(module: str, *, at_import: bool = False) -> Iterator[str]:
    """The modules that a module imports anywhere, also in functions and for types.

    warmd's own without the `warmd.`, other libraries by the name of their top package.
    `at_import`: only those that are imported with the module.
    """
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for node in outside_functions(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(
                [*parts[: len(parts) - node.level + 1], *(node.module or "").split(".")]
            )
            base = base.strip(".")
            for alias in node.names:
                found = f"{base}.{alias.name}"
                yield found if found in SOURCES else base


@cache
def all_arrows() -> dict[str, frozenset[str]]:
    """The imports of every module. Not computed at import: test collection imports this file."""
    return {module: frozenset(imports_of(module)) - {module} for module in SOURCES}


def package_of(module: str) -> str:
    """`daemon.queue` of `daemon.queue.jobs`; modules below a second level count for that level."""
    if module in CONTRACT or module == "jobs":
        return "jobs"
    depth = 3 if module.startswith("daemon.gateway.") else 2
    parts = module.split(".")
    is_package = SOURCES[module].name == "__init__.py"
    return ".".join(parts[:depth] if is_package or len(parts) > depth else parts[:-1])


def circles(arrows: dict[str, frozenset[str]]) -> list[list[str]]:
    """The modules on import cycles: all but those that no cycle can contain."""
    left = dict(arrows)
    while True:
        ends = [
            one
            for one, others in left.items()
            if not others & left.keys() - {one}
            or not any(one in more for other, more in left.items() if other != one)
        ]
        if not ends:
            return [sorted(left)] if left else []
        for one in ends:
            del left[one]


def floors(package: str) -> int:
    """The length of the longest chain of imports inside a package."""
    own = {module for module in SOURCES if within(module, package) and module != package}

    @cache
    def depth(module: str) -> int:
        return 1 + max((depth(other) for other in all_arrows()[module] & own), default=0)

    return max(map(depth, own))


def importers(target: str) -> set[str]:
    return {module for module, others in all_arrows().items() if target in others}


def loaded_with(module: str, at_import: dict[str, set[str]]) -> set[str]:
    """All modules and libraries that are loaded when a module is imported."""
    found: set[str] = set()
    new = {module}
    while new:
        found |= new
        parents = {one.rpartition(".")[0] for one in new if one.rpartition(".")[0] in SOURCES}
        new = {other for one in new for other in at_import.get(one, ())} | parents
        new -= found
    return found


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_import_cycles_are_detected():
    arrows = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("b"), "d": frozenset("a")}
    assert circles(arrows) == [["b", "c"]]


def test_modules_have_no_import_cycles():
    assert circles(all_arrows()) == []


def test_packages_have_no_import_cycles():
    packages: dict[str, set[str]] = {}
    for module, others in all_arrows().items():
        found = {package_of(other) for other in others if other in SOURCES}
        packages.setdefault(package_of(module), set()).update(found)
    arrows = {one: frozenset(others - {one}) for one, others in packages.items()}
    assert circles(arrows) == []


@pytest.mark.parametrize(
    "package", ["daemon.queue", "daemon.lifecycle", "daemon.store", "daemon.work"]
)
def test_a_package_has_at_most_six_floors(package):
    assert floors(package) <= 6


# Package -> the packages of warmd that it may import.
ALLOWED = {
    "configs": (),
    "jobs": ("configs",),
    "daemon": ("configs", "jobs"),
    "cli": ("configs", "daemon", "jobs"),
    "jobs.files": ("jobs.errors",),
    "jobs.data": (*CONTRACT, "jobs.files"),
    "jobs.graders": (*CONTRACT, "jobs.user_code"),
    "jobs.compute": (*CONTRACT, "configs", "jobs.files"),
    "jobs.engine": (
        *CONTRACT,
        "configs",
        "jobs.compute",
        "jobs.files",
        "jobs.models",
        "jobs.user_code",
    ),
    "jobs.environments": (
        *CONTRACT,
        "jobs.data",
        "jobs.files",
        "jobs.models",
        "jobs.rewards",
        "jobs.user_code",
    ),
    "jobs.models": (*CONTRACT, "configs", "jobs.files", "jobs.user_code"),
    "jobs.training": (
        *CONTRACT,
        "configs",
        "jobs.durations",
        "jobs.libraries",
        "jobs.compute",
        "jobs.data",
        "jobs.files",
        "jobs.models",
        "jobs.intervals",
        "jobs.sequences",
        "jobs.user_code",
    ),
    "jobs.losses": (),
    "jobs.compute.native": ("jobs.compute.cache",),  # where its machine code is kept
    "jobs.sequences": (
        *CONTRACT,
        "configs",
        "jobs.compute",
        "jobs.engine",
        "jobs.files",
        "jobs.models",
    ),
    "jobs.rewards": (
        *CONTRACT,
        "jobs.data",
        "jobs.files",
        "jobs.graders",
        "jobs.models",
        "jobs.training",
        "jobs.user_code",
    ),
    "jobs.codegraph": (*CONTRACT, "jobs.data", "jobs.files"),  # it reads folders and triples
    "jobs.user_code": ("jobs.errors", "jobs.files"),
    "daemon.runs": ("jobs",),
    "daemon.host": ("configs", "jobs"),
    "daemon.store": ("configs", "jobs", "daemon.host", "daemon.runs"),
    "daemon.queue": ("configs", "jobs"),
    "daemon.lifecycle": (
        *("configs", "jobs", "daemon.host", "daemon.runs", "daemon.store", "daemon.queue"),
    ),
    "daemon.fork": ("configs", "jobs", "daemon.host", "daemon.runs"),
    "daemon.work": (
        *("configs", "jobs", "daemon.host", "daemon.runs", "daemon.store", "daemon.queue"),
        "daemon.lifecycle",
    ),
    "daemon.groups": (
        *("configs", "jobs", "daemon.host", "daemon.runs", "daemon.queue", "daemon.lifecycle"),
        "daemon.store",
    ),
    "daemon.supervise": (
        *("configs", "jobs", "daemon.host", "daemon.runs", "daemon.queue", "daemon.groups"),
        "daemon.lifecycle",
        "daemon.store",
        "daemon.notify",
    ),
    "daemon.client": (
        *("configs", "jobs", "daemon.host", "daemon.runs", "daemon.queue", "daemon.groups"),
        "daemon.lifecycle",
        "daemon.store",
    ),
    "daemon.reports": (
        *(
            "configs",
            "jobs",
            "daemon.client",
            "daemon.groups",
            "daemon.host",
            "daemon.runs",
            "daemon.lifecycle",
        ),
        "daemon.groups",
    ),
    "daemon.api": (
        *("configs", "jobs", "daemon.client", "daemon.host", "daemon.runs", "daemon.queue"),
        *("daemon.lifecycle", "daemon.reports"),
    ),
    "daemon.notify": ("configs", "jobs", "daemon.host", "daemon.runs"),
    "daemon.gateway": (
        *("configs", "jobs", "daemon.client", "daemon.host", "daemon.runs", "daemon.queue"),
        *("daemon.lifecycle", "daemon.reports"),
    ),
    "daemon.gateway.api": (
        *("configs", "jobs", "daemon.client", "daemon.host", "daemon.runs"),
        *("daemon.gateway.core", "daemon.gateway.http", "daemon.lifecycle", "daemon.reports"),
    ),
    "daemon.gateway.core": (
        *("configs", "jobs", "daemon.client", "daemon.host", "daemon.runs", "daemon.queue"),
        *("daemon.gateway.http", "daemon.lifecycle"),
    ),
    "daemon.gateway.http": ("configs", "jobs"),
    "daemon.gateway.page": ("daemon.gateway.http",),
    "cli.warm": (),
    "cli.view": ("configs", "jobs", "daemon"),
    "cli.mcp": ("jobs", "daemon.lifecycle"),
    "cli.shared": ("configs", "jobs", "daemon", "cli.view"),
}


def test_losses_import_torch_and_the_standard_library_only():
    known = {"torch", *sys.stdlib_module_names}
    others = {
        other
        for module in SOURCES
        if within(module, "jobs.losses")
        for other in all_arrows()[module]
        if other not in known and not within(other, "jobs.losses")
    }
    assert others == set()


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_those_below_it(package):
    for module in SOURCES:
        if within(module, package):
            own = (package, "warmd", *ALLOWED[package])
            others = [other for other in all_arrows()[module] if within(other, *TOP)]
            assert [other for other in others if not within(other, *own)] == [], module


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_imports_no_other_kind(kind):
    others = tuple(other for other in KINDS if other != kind)
    for module in SOURCES:
        if within(module, kind):
            assert not [one for one in all_arrows()[module] if within(one, *others)], module


@pytest.mark.parametrize(
    ("library", "packages"),
    [
        ("rq", ["daemon.queue.rq_format"]),
        ("obstore", ["daemon.store.bucket"]),
        ("fastapi", ["daemon.gateway"]),
        ("mcp", ["cli.mcp.tools"]),
        ("torch", ["daemon.fork", "jobs"]),
        ("transformers", ["daemon.fork", "jobs"]),
    ],
)
def test_a_library_is_imported_only_where_it_belongs(library, packages):
    found = importers(library)
    assert found
    assert [module for module in found if not within(module, *packages)] == []


@pytest.mark.slow
def test_only_submissions_queue_a_job():
    """So a job is nowhere queued without its whole run directory, or without its needs."""
    found = {
        module
        for module, path in SOURCES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == "enqueue"
        and ast.unparse(node.value).endswith("store")
    }
    assert found == {"daemon.lifecycle.submit"}


def bases_of(module: str) -> Iterator[tuple[str, str, str]]:
    """The classes of a module with the names of their bases and the modules these are from."""
    tree = ast.parse(SOURCES[module].read_text())
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = package.split(".")
            base = [*parts[: len(parts) - node.level + 1], *(node.module or "").split(".")]
            for alias in node.names:
                origins[alias.asname or alias.name] = ".".join(base).strip(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for one in node.bases:
                name = ast.unparse(one).partition("[")[0]
                yield node.name, name, origins.get(name.partition(".")[0], module)


def test_no_class_borrows_methods_from_a_class_of_another_package():
    """Errors and the fields of HTTP requests aside, which are kinds of those that they extend."""
    found = {
        f"{module}.{name}({base})"
        for module in SOURCES
        if within(module, "daemon")
        for name, base, origin in bases_of(module)
        if package_of(origin) != package_of(module)
        and origin not in ("jobs.errors", "daemon.gateway.core.sampling")
    }
    assert found == set()


def test_lists_of_statuses_stand_once():
    statuses = {"queued", "scheduled", "deferred", "finished", "stopped", "canceled"}
    found = {
        module
        for module, path in SOURCES.items()
        if within(module, "cli", "daemon")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Tuple | ast.Set | ast.List)
        and len(statuses & {one.value for one in node.elts if isinstance(one, ast.Constant)}) > 2
    }
    assert found == {"daemon.lifecycle.statuses"}


@pytest.mark.slow
def test_no_process_sends_pickles_to_another():
    """Whoever can write to a connection, a store or a queue would run code in the other process."""
    libraries = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing")
    found = {name: importers(name) for name in libraries}
    assert {name: modules for name, modules in found.items() if modules} == {
        "pickle": {"jobs.training.compare"},  # for torch's error of a file that it refuses
    }
    names = {
        module: {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for module in SOURCES
        for tree in [ast.parse(SOURCES[module].read_text())]
    }
    compare = ast.parse(SOURCES["jobs.training.compare"].read_text())
    used = {ast.unparse(node) for node in ast.walk(compare) if isinstance(node, ast.Attribute)}
    assert {one for one in used if one.startswith("pickle.")} == {"pickle.UnpicklingError"}
    collectives = {"all_gather_object", "gather_object"} | {  # of torch.distributed
        f"{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")
    }
    assert {
        module: collectives & names[module] for module in SOURCES if collectives & names[module]
    } == {}


def test_no_module_outside_the_zygote_loads_a_library_that_computes_when_it_is_imported():
    """Nor does the zygote's own: it loads them once it runs, and reports how long that takes."""
    at_import = {module: set(imports_of(module, at_import=True)) for module in SOURCES}
    heavy = {"numpy", "torch", "transformers", "trl", "peft"}
    assert {"torch", "transformers", "trl"} <= loaded_with("jobs.grpo.step", at_import)
    for module in SOURCES:
        is_of_fork = within(module, "daemon.fork") and module != "daemon.fork.zygote"
        if within(module, "cli", "configs", "daemon") and not is_of_fork:
            assert not heavy & loaded_with(module, at_import), module


def test_the_command_line_imports_no_heavy_library():
    for library in ("torch", "transformers", "trl", "rq"):
        found = [module for module in importers(library) if within(module, "cli", "configs")]
        assert found == [], library


def test_every_package_has_a_rule():
    without = (
        "jobs.bench",
        "jobs.verify_trl",
        "cli.commands",
    )  # they may import everything below them
    packages = {package_of(module) for module in SOURCES}
    assert {one for one in packages if not within(one, *KINDS, *without)} <= ALLOWED.keys()


def test_the_contract_of_a_kind_imports_nothing_else():
    for module in CONTRACT:
        others = {other for other in all_arrows()[module] if within(other, *TOP)}
        assert others <= {*CONTRACT, "configs", "configs.queues"}, module


def test_every_package_has_a_docstring_of_three_lines():
    for module, path in SOURCES.items():
        if path.name == "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert len([line for line in text.splitlines() if line]) >= 3, module


def test_the_map_of_the_test_helpers_names_every_module():
    folder = ROOT / "tests" / "support"
    helpers = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    named = set(re.findall(r"`(\w+)`", helpers.partition("Words that")[0]))
    missing = {path.stem for path in folder.glob("*.py")} - named - {"__init__"}
    assert missing == set()
    assert {name for name in named if not (folder / f"{name}.py").exists()} == set()

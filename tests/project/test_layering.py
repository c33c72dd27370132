"""Imports between packages point one way, without circles, and some libraries have one importer."""

import ast
import functools
import graphlib
import pathlib
import re

from tests.cache.faults import CALLS

ROOT = pathlib.Path(__file__).parents[2] / "cachedfs"

# A package imports only from those on the lines above its own: docs/design.md draws it.
LAYERS = [
    {"errors"},
    {"common"},
    {"config", "sim"},
    {"cache", "origins", "readahead"},
    {"shared"},
    {"core"},
    {"prefetch"},
    {"filesystem"},
    {"obspec", "report", "mount", "server"},
    {"datasets"},
    {"packing"},
    {"demo"},
    {"cli"},
]
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
ONLY_IMPORTERS = {
    "torch": {"datasets"}, "zarr": {"datasets", "demo", "packing"}, "h5py": {"datasets", "packing"}, "gcsfs": {"origins"},
    "google": {"origins"}, "pydrive2": {"origins", "demo"}, "sqlite3": {"cache"}, "fcntl": {"cache"}, "mmap": set(),
}  # fmt: skip


def is_facade(module):
    """Return whether the module only re-exports public names; no module of cachedfs may import it."""
    return module in ("cachedfs", "cachedfs.__main__", "cachedfs.datasets")


def package_of(module):
    return module.split(".")[1]


@functools.cache
def modules():
    """Return the parsed modules by their dotted names."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("cachedfs", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


@functools.cache
def imports(tree):
    """Return the dotted names that a module imports, also inside functions and for types."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules() else node.module for name in names}
    return found


def test_every_package_has_a_layer():
    assert {package_of(module) for module in modules() if module != "cachedfs"} == {*LAYER, "__main__"}


def test_imports_point_to_lower_layers():
    for module, tree in modules().items():
        if is_facade(module):
            continue
        package = package_of(module)
        for name in imports(tree):
            if name.startswith("cachedfs.") and package_of(name) != package:
                assert LAYER[package_of(name)] < LAYER[package], f"{module} imports {name}"


def test_no_modules_import_each_other():
    graph = {
        module: {name for name in imports(tree) if name in modules()} for module, tree in modules().items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_only_demo_and_cli_import_the_simulated_clouds():
    for module, tree in modules().items():
        used = {package_of(name) for name in imports(tree) if name.startswith("cachedfs.")}
        if module.startswith("cachedfs.sim"):
            assert used <= {"sim"}, module
        elif not module.startswith(("cachedfs.cli", "cachedfs.demo")):
            assert "sim" not in used, module


def test_some_libraries_have_one_importer():
    for module, tree in modules().items():
        for name in imports(tree):
            allowed = ONLY_IMPORTERS.get(name.split(".")[0])
            assert allowed is None or package_of(module) in allowed | {"sim"}, f"{module} imports {name}"


def test_no_pickle():
    for module, tree in modules().items():
        assert not imports(tree) & {"pickle", "marshal", "shelve"}, module


def test_every_system_call_of_the_cache_can_be_replaced_by_a_test():
    """So a test that makes the disk fail, or kills a process at a call, misses none; only SQLite makes calls of its own."""
    system = {"glob", "io", "mmap", "pathlib", "socket", "subprocess", "tempfile"}
    never_fail = {"os.geteuid", "os.getpid", "os.path.expanduser", "os.path.realpath", "os.register_at_fork"}
    never_fail |= {"os.stat_result", "os.supports_effective_ids", "os.uname", "os.urandom"}
    for module, tree in modules().items():
        if not module.startswith("cachedfs.cache.") or module == "cachedfs.cache.disk":
            continue
        assert not {name.split(".")[0] for name in imports(tree)} & system, module
        called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert "open" not in map(ast.unparse, called), module
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        calls = {name for name in used if re.fullmatch(r"(fcntl|os|shutil)(\.path)?\.[a-z_]+", name)} - {
            "os.path"
        }
        assert calls <= {*CALLS, *never_fail}, module
        by_name = {
            (node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in ("cachedfs.cache.disk", "os", "shutil")
            for alias in node.names
        }
        # A function imported by its name would be called past whoever replaced it.
        assert by_name <= {("cachedfs.cache.disk", name) for name in ("Buffer", "is_network")}, module

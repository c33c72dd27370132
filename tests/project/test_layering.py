"""The layers of docs/design.md: imports point down, and some libraries have one importer."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[2] / "cachedfs"

# Row of each module or room; a room's own modules may import each other.
ROWS = {
    "errors": 0, "config": 0, "model": 0, "checksums": 0, "workers": 0, "logs": 0, "events": 0, "words": 0, "tables": 0, "localfiles": 0, "names": 0, "shared_file": 0, "imports": 0,
    "plan": 1,
    "cache": 2, "origins": 2,
    "arrivals": 3, "orders": 3, "flights": 3, "ahead": 3, "questions": 3, "refusals": 3, "telling": 3, "facts": 3, "writebehind": 3, "engine": 3, "engines": 3, "source": 3,
    "fetcher": 3, "sent": 3, "habits": 3,
    "feeds": 3,
    "listings": 3, "standby": 3,
    "catalog": 3,
    "chunks": 3,
    "assembly": 3,
    "hits": 3,
    "reader": 3,
    "integrity": 3,
    "items": 3, "foresight": 3, "parts": 3, "course": 3, "distance": 3, "pending": 3, "sending": 3, "plans": 3, "prefetch": 3, "carrying": 3,
    "written": 4,
    "inhand": 4, "rawreader": 4, "file": 4, "caching": 4, "writing": 4, "filesystem": 4,
    "datasets": 5, "report": 5,
    "demo_session": 6, "demo": 6, "cli": 6, "__main__": 6,
}  # fmt: skip
ORDER_IN_ROW = {
    3: [
        "arrivals",
        "orders",
        "flights",
        "ahead",
        "questions",
        "refusals",
        "telling",
        "facts",
        "writebehind",
        "engine",
        "engines",
        "source",
        "fetcher",
        "sent",
        "habits",
        "feeds",
        "listings",
        "standby",
        "catalog",
        "chunks",
        "assembly",
        "hits",
        "reader",
        "integrity",
        "items",
        "foresight",
        "parts",
        "course",
        "distance",
        "pending",
        "sending",
        "plans",
        "prefetch",
        "carrying",
    ],
    4: ["written", "inhand", "rawreader", "file", "caching", "writing", "filesystem"],
    0: [
        "imports",
        "errors",
        "checksums",
        "localfiles",
        "words",
        "tables",
        "model",
        "config",
        "workers",
        "logs",
        "events",
    ],
    6: ["demo_session", "demo", "cli", "__main__"],
}
ONLY_IMPORTERS = {
    "torch": {"datasets"}, "zarr": {"datasets", "demo_session"}, "h5py": {"datasets"}, "gcsfs": {"origins"}, "google": {"origins"},
    "pydrive2": {"origins", "demo_session"}, "sqlite3": {"cache"}, "fcntl": {"cache"}, "mmap": {"cache"},
    "matplotlib": {"report"},
}  # fmt: skip


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield path, parts[0]


def imports(path, *, at_run_time_only=True):
    """Yield the dotted names that a module imports, but for those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped |= {id(child) for statement in node.body for child in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "cachedfs":
                yield from (f"cachedfs.{alias.name}" for alias in node.names)


def rooms_imported(path):
    return {name.split(".")[1] for name in imports(path) if name.startswith("cachedfs.")}


def test_every_module_has_a_row():
    assert {room for _, room in modules()} - {"__init__", "sim"} <= set(ROWS)


def test_imports_point_down():
    for path, room in modules():
        if room in ("__init__", "sim"):
            continue
        for other in rooms_imported(path) - {room, "sim"}:
            lower = ROWS[other] < ROWS[room]
            order = ORDER_IN_ROW.get(ROWS[room], [])
            before = ROWS[other] == ROWS[room] and other in order and order.index(other) < order.index(room)
            assert lower or before, f"{path.relative_to(ROOT)} imports {other}: arrows point down"


def test_the_simulation_stands_apart():
    for path, room in modules():
        if room == "sim":
            assert rooms_imported(path) <= {"sim"}
        elif room not in ("demo", "cli"):
            assert "sim" not in rooms_imported(path), path


def test_some_libraries_have_one_importer():
    for path, room in modules():
        for name in imports(path):
            allowed = ONLY_IMPORTERS.get(name.split(".")[0])
            assert allowed is None or room in allowed or room == "sim", (
                f"{path.relative_to(ROOT)} imports {name}"
            )


def test_plan_is_pure():
    impure = {
        "os",
        "io",
        "time",
        "random",
        "asyncio",
        "threading",
        "logging",
        "socket",
        "pathlib",
        "datetime",
    }
    for path, room in modules():
        if room == "plan":
            tree = ast.parse(path.read_text())
            assert not {name.split(".")[0] for name in imports(path)} & impure, path
            assert not [
                node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await)
            ], path


def test_no_pickle_and_no_print():
    for path, room in modules():
        names = set(imports(path))
        assert not names & {"pickle", "marshal", "shelve"}, path
        if room not in ("cli", "demo", "sim"):
            tree = ast.parse(path.read_text())
            calls = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            ]
            assert not [call for call in calls if call.func.id == "print"], path


def test_the_cache_reaches_the_system_through_its_disk_module_alone():
    """So a test that makes `disk` fail, or die, makes all of it fail; only SQLite makes calls of its own."""
    system = {
        "os",
        "io",
        "fcntl",
        "mmap",
        "pathlib",
        "shutil",
        "tempfile",
        "resource",
        "glob",
        "socket",
        "subprocess",
    }
    for path in sorted((ROOT / "cache").glob("*.py")):
        if path.name == "disk.py":
            continue
        allowed = {"mmap"} if path.name == "shared.py" else set()  # for the type of a mapping
        assert not {name.split(".")[0] for name in imports(path)} & system - allowed, path
        tree = ast.parse(path.read_text())
        called = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "open" not in called, path
        from_disk = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "cachedfs.cache.disk"
        ]
        # A function imported by its name would be called past whoever replaced it.
        assert {alias.name for node in from_disk for alias in node.names} <= {"Buffer", "is_network"}, path

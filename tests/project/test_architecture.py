"""The layers: imports point downwards, and no framework is imported."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import re
import subprocess
import sys
import types
from collections.abc import Iterable
from pathlib import Path

import pytest
from cuda.bindings import driver

import userstream
from helpers import run_python

PACKAGE = Path(userstream.__file__).parent

# From the top to the bottom. A module imports from below itself, or from its own package.
LAYERS = [
    "__main__",
    "_report",
    "__init__",
    "_observe",
    "_registry",
    "_copies",
    "_ordering",
    "_table",
    "_targets",
    "_stream",
    "_engine",
    "_arguments",
    "_buffers",
    "_driver",
    "_process",
    "_trace",
    "_hooks",
    "_unentered",
    "typing",
    "errors",
    "_built",
]
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


# The tools on top of the library, of which the rest of the package knows nothing.
GUESTS = ("_observe", "testing")
ENTRY_POINTS = ("__init__", "__main__")


@functools.cache
def tree_of(module: Path) -> ast.Module:
    """Return the syntax of a module, which nobody changes."""
    return ast.parse((PACKAGE / module).read_text())


def package_of(module: Path) -> str:
    """Return the package of a module, or the name of a module that is in none."""
    return module.parts[0].removesuffix(".py")


def imported_packages(module: Path) -> set[str]:
    """Return the packages of userstream that a module imports, for types as well."""
    names = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and module.is_relative_to("_observe/judge"):
            assert node.level == 1 or node.module.partition(".")[0] in sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names if name.split(".")[0] == "userstream"]
    return {part[1] if len(part) > 1 and _is_module(part[1]) else "__init__" for part in parts}


def _is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_downwards(module: Path) -> None:
    if package_of(module) == "testing":  # beside the library
        assert imported_packages(module) <= {"testing", "_driver", "_built", "_process"}
        return
    allowed = {*LAYERS[LAYERS.index(package_of(module)) + 1 :], package_of(module)}
    if package_of(module) in ("__main__", "_observe"):
        allowed.add("testing")
    assert imported_packages(module) <= allowed


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_the_guests_are_imported_on_first_use_by_the_entry_points_alone(module: Path) -> None:
    if package_of(module) in GUESTS:
        return
    tree = tree_of(module)
    assert not guests_in(tree.body), "imported with the module"
    assert not guests_in(ast.walk(tree)) or package_of(module) in ENTRY_POINTS


def guests_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the guests that import statements among some nodes name."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "userstream" and part[1] in GUESTS}


@pytest.mark.parametrize(
    "code", ["from userstream import testing", "import userstream._observe.judge as judge"]
)
def test_an_import_of_a_guest_is_found(code: str) -> None:
    assert guests_in(ast.parse(code).body)


def imported_files(module: Path) -> set[str]:
    """Return the files that a file imports: for types and inside of functions as well."""
    files = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            files |= {_file(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = ".".join(("userstream", *module.parts[:-1])) if node.level else ""
            source = ".".join(filter(None, (inside, node.module)))
            files |= {_file(f"{source}.{alias.name}") for alias in node.names}
    return files - {"", str(module)}


def _file(name: str) -> str:
    """Return the file of a module, or of the one that has the name; nothing for other packages."""
    package, *parts = name.split(".")
    if package != "userstream":
        return ""
    for path in ("/".join(parts), "/".join(parts[:-1])):
        for file in (f"{path}.py", f"{path}.pyi", f"{path}/__init__.py"):
            if path and (PACKAGE / file).exists():
                return file
    return "__init__.py"


def test_no_files_form_a_circle() -> None:
    graph = {str(module): imported_files(module) for module in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_the_name_of_a_module_is_that_module(module: Path) -> None:
    """An attribute of a package of the same name would hide it from `import`."""
    *packages, name = ("userstream", *module.with_suffix("").parts)
    package = importlib.import_module(".".join(packages))
    if not name.startswith("__") and name in vars(package):
        assert isinstance(vars(package)[name], types.ModuleType)


def test_the_driver_is_called_from_one_package() -> None:
    for module in MODULES:
        if package_of(module) in ("_driver", "testing"):
            continue
        tree = tree_of(module)
        calls = {
            node.func.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        assert not {name for name in calls if name.startswith("cu") and name[2:3].isupper()}, module


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_nothing_is_replaced_at_run_time(module: Path) -> None:
    """Tools are told of events by `_hooks`; an attribute of a module or class is never set."""
    tree = tree_of(module)
    others = _modules_and_classes(tree)
    replaced = {ast.unparse(node) for node in ast.walk(tree) if _replaces(node, others)}
    # `python -m userstream observe` gives a program its own arguments.
    assert replaced <= ({"sys.argv"} if str(module) == "_observe/command.py" else set())


def _modules_and_classes(tree: ast.Module) -> set[str]:
    """Return the names of classes in a module, and all names that the module imports."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(each.asname or each.name).split(".")[0] for each in node.names}
    return names


def _replaces(node: ast.AST, others: set[str]) -> bool:
    """Return whether a node sets an attribute of one of `others`, or of a computed object."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return _root(node) in others
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        return not isinstance(node.args[0], ast.Name) or _root(node.args[0]) in others
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("update", "setdefault", "pop"):
        of = node.func.value  # as in vars(module).update(...)
        if isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "vars":
            return _root(of.args[0]) in others
    return False


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize(
    "code",
    [
        "from userstream import _copies\n_copies.copies.asnumpy = None",
        "from userstream._ordering.borrow import Borrow\ndef begin():\n    Borrow.__enter__ = None",
        "import userstream._driver as d\nd.core.order += 1",
        "from userstream._driver import core\nsetattr(core, 'order', None)",
        "from userstream._driver import core\nvars(core).update(order=None)",
        "class A: pass\ndel A.x",
        "setattr(*found)",
        "import threading\nthreading.excepthook = print",
    ],
)
def test_what_replaces_something_is_found(code: str) -> None:
    tree = ast.parse(code)
    assert any(_replaces(node, _modules_and_classes(tree)) for node in ast.walk(tree))


def test_locks_are_those_that_a_signal_leaves_free() -> None:
    for module in MODULES:
        calls = re.findall(r"\b(?:threading|_thread)\.(?:R?Lock|allocate_lock)\b", _code(module))
        assert not calls or str(module) == "_process.py", f"{module}: use the locks of _process"


def _code(module: Path) -> str:
    return ast.unparse(tree_of(module))


def test_every_stream_function_is_answered() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/driver-functions.md").read_text()
    answered = set(re.findall(r"`(cu\w+)`", page.split("Every stream function")[1]))
    subjects = re.compile("cu(Stream|GreenCtxStream|ThreadExchange|LaunchHost)")
    there = {name for name in dir(driver) if subjects.match(name)}
    # cuda-bindings 12.9 names the newest signature by a suffix.
    suffixed = {"cuStreamGetCtx_v2", "cuStreamGetCaptureInfo_v3"}
    assert there - answered <= suffixed | {"cuStreamUpdateCaptureDependencies_v2"}


def test_no_framework_is_imported() -> None:
    done = run_python(
        """
        import sys
        import userstream as us

        class Foreign:
            def __dlpack_device__(self): return (2, 0)

        us.get_stream(Foreign())
        us.get_stream(0)
        us.wait(Foreign())
        frameworks = {"torch", "cupy", "jax", "numba", "rmm", "nvidia.dali"}
        assert not frameworks & set(sys.modules), frameworks & set(sys.modules)
        """,
    )
    assert done.returncode == 0, done.stderr


def test_what_takes_long_to_load_is_loaded_when_it_is_needed() -> None:
    done = run_python(
        """
        import sys
        import cuda.core
        before = set(sys.modules)
        import userstream
        late = {"asyncio", "concurrent.futures", "logging", "ml_dtypes"}
        late.add("userstream._engine.futures")
        loaded = set(sys.modules) - before
        assert "userstream._engine.host_wait" in loaded
        assert not late & loaded, late & loaded
        """,
        simulate=None,
    )
    assert done.returncode == 0, done.stderr


def test_what_few_programs_need_is_loaded_when_it_is_used() -> None:
    done = run_python(
        """
        import sys
        import cuda.core, numpy
        before = set(sys.modules)
        import userstream as us

        loaded = set(sys.modules) - before
        ours = {name for name in loaded if name.split(".")[0] == "userstream"}
        assert loaded == ours, loaded - ours
        late = (
            "_buffers.", "_copies.", "_driver.capture", "_driver.copies", "_driver.host_pools",
            "_driver.pointers", "_driver.values",
            "_engine.dispatcher", "_engine.futures", "_observe", "_ordering.borrow",
            "_ordering.ordering", "_ordering.resolver", "_report",
            "_stream.activation", "_stream.attributes", "_stream.capture",
            "_stream.events", "_stream.host_functions", "_stream.memory_operations",
            "_built", "_unentered", "testing",
        )
        early = {name for name in ours if name.removeprefix("userstream.").startswith(late)}
        small = {"_buffers.framework"}
        assert early <= {f"userstream.{name}" for name in small}, early
        objects = [each for name in ours for each in vars(sys.modules[name]).values()]
        slow = [each for each in objects if isinstance(each, type) and hasattr(each, "_fields")]
        assert not slow, f"named tuples, which take half a millisecond each to create: {slow}"
        assert set(us.__all__) <= set(dir(us))
        for name in us.__all__:
            getattr(us, name)
        for missing in (us, us._copies, us._driver, us._engine, us._ordering, us._stream):
            assert not hasattr(missing, "no_such_name")
        """,
        simulate=None,  # to simulate loads it before
    )
    assert done.returncode == 0, done.stderr


def test_a_file_of_a_framework_is_loaded_with_the_first_of_its_objects() -> None:
    done = run_python(
        """
        import sys
        import userstream as us

        class Tensor:
            __module__ = "torch"

            def __dlpack_device__(self): return (2, 0)

        def loaded():
            return {name for name in files if f"userstream._buffers.{name}" in sys.modules}

        files = {"torch", "cupy", "jax", "numba", "dali", "warp", "tvm_ffi", "cvcuda", "dlpack"}
        assert not loaded()
        us.get_stream(0), us.wait(0)
        us.get_stream(type("Mine", (Tensor,), {})())
        assert loaded() == {"torch", "dlpack"}, loaded()
        """,
    )
    assert done.returncode == 0, done.stderr


# -- the tests ------------------------------------------------------------------------------------

TESTS = Path(__file__).parents[1]
TEST_FILES = sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))


def private_imports(path: Path) -> set[str]:
    """Return the private modules of userstream that a test file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if re.match(r"userstream\.(\w+\.)*_(?!_main__)", name)}


@pytest.mark.parametrize("path", TEST_FILES, ids=str)
def test_a_test_file_is_short_and_named_internal_if_it_imports_private_modules(path: Path) -> None:
    lines = len((TESTS / path).read_text(encoding="utf-8").splitlines())
    assert lines <= 800, f"{path} has {lines} lines: split it by subject"
    if not path.stem.endswith("_internal"):
        assert not private_imports(TESTS / path), (
            f"{path}: use what users use, tests/support, or move the test to a file *_internal.py"
        )


def test_the_judge_needs_the_standard_library_alone() -> None:
    """It judges logs where neither userstream's dependencies nor a driver are installed."""
    program = f"""
import sys
before = set(sys.modules)
sys.path.insert(0, {str(PACKAGE / "_observe")!r})
import judge, judge.reports, judge.allocations
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
assert loaded <= {{"judge", *sys.stdlib_module_names}}, loaded
"""
    command = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_few_test_files_are_internal() -> None:
    internal = [path for path in TEST_FILES if path.stem.endswith("_internal")]
    assert len(internal) <= 23, internal

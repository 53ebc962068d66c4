"""Every public name is documented, with an example, and shows the path that users import it from.

That each has a type is for ``pyright --verifytypes`` to say: see the session `lint` of noxfile.py.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

import userstream
import userstream.testing
import userstream.typing

MODULES = (userstream, userstream.errors, userstream.testing, userstream.typing)
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
OF_A_CLASS = (types.FunctionType, classmethod, staticmethod, property)


def _members(kind: type) -> dict[str, Any]:
    """Return the public methods and properties of a class, without those of others' bases."""
    ours = [each for each in kind.__mro__ if each.__module__.startswith("userstream")]
    names = {name for each in ours for name in vars(each) if name[0] != "_"}
    members = {name: inspect.getattr_static(kind, name) for name in sorted(names)}
    return {name: thing for name, thing in members.items() if isinstance(thing, OF_A_CLASS)}


def _public() -> dict[str, Any]:
    """Return what users see, by the path under which they do."""
    found: dict[str, Any] = {}
    for module in MODULES:
        for name in module.__all__:
            path, thing = f"{module.__name__}.{name}", getattr(module, name)
            if module is userstream.errors or isinstance(thing, types.ModuleType):
                continue  # seen as userstream.X, and as a module
            found[path] = thing
            if isinstance(thing, type):
                found |= {f"{path}.{member}": it for member, it in _members(thing).items()}
    return found


PUBLIC = _public()
ALIASES = [
    path
    for path in PUBLIC
    if path.startswith("userstream.typing.") and not isinstance(PUBLIC[path], type)
]
THINGS = [path for path in PUBLIC if path not in ALIASES]


def test_completion_offers_public_names_and_modules_alone() -> None:
    # pytest rewrites the asserts of what is installed with a plugin: names with an @ are its own.
    offered = {name for name in dir(userstream) if name[0] not in "_@"}
    assert offered <= {*userstream.__all__, "testing", "typing"}


def test_the_lists_are_right() -> None:
    for path in ("Stream.wait", "Stream.is_done", "UserStream.get", "WaitErrors.derive", "wait"):
        assert f"userstream.{path}" in THINGS
    assert "userstream.testing.latch" in THINGS
    assert "userstream.typing.Target" in ALIASES
    assert "userstream.Stream.is_closed" not in PUBLIC, "that is cuda.core's"


@pytest.mark.parametrize("path", THINGS)
def test_it_has_an_example(path: str) -> None:
    assert ">>> " in (inspect.getdoc(PUBLIC[path]) or "")


@pytest.mark.parametrize("path", THINGS)
def test_it_shows_where_it_is_imported_from(path: str) -> None:
    thing = PUBLIC[path]
    if isinstance(thing, property):
        return  # only its class is shown
    thing = getattr(thing, "__func__", thing)
    if "." not in thing.__qualname__:  # a method is shown with its class
        assert thing.__module__ in [module.__name__ for module in MODULES]
    assert path.endswith(thing.__qualname__.removeprefix("UserStream."))


@pytest.mark.parametrize("kind", [userstream.Stream, userstream.UserStream])
def test_a_class_is_one_class_in_one_file(kind: type) -> None:
    assert len(kind.__mro__) <= 3, "itself, cuda.core's and object"
    code = [getattr(thing, "__func__", thing) for thing in vars(kind).values()]
    functions = [each for each in code if inspect.isfunction(each)]
    own = [each for each in functions if each.__qualname__.startswith(kind.__name__)]
    assert len({inspect.getsourcefile(inspect.unwrap(each)) for each in own}) == 1


def test_docstrings_are_in_order() -> None:
    numpydoc = pytest.importorskip("numpydoc.validate")
    chosen = tomllib.loads(PYPROJECT.read_text())["tool"]["numpydoc_validation"]["checks"]
    checks = numpydoc.get_validation_checks(set(chosen))
    wrong = []
    for path in THINGS:
        thing, ignored = PUBLIC[path], set()
        if isinstance(thing, type) and "\nParameters\n" not in (inspect.getdoc(thing) or ""):
            ignored = {"PR01"}  # a class that users do not make: its attributes say what it has
        errors = numpydoc.validate(path)["errors"]
        wrong += [f"{path}: {code} {text}" for code, text in errors if code in checks - ignored]
    assert wrong == []


# -- errors: each function lists its own, and refers to the page of the others ---------------------

ERRORS_PAGE = Path(__file__).parents[2] / "docs/reference/common-errors.md"
OF_ANY_CALL = {"DriverNotFoundError", "ForkedError", "ClosedError"}
NEEDS_NO_CUDA = {"userstream.UserStream.set_pinned_limit", "userstream.stall_allowed"}
LISTING = [path for path in THINGS if "\nRaises\n------\n" in (inspect.getdoc(PUBLIC[path]) or "")]
CALLING = [
    path
    for path in LISTING
    if re.match(r"userstream\.((User)?Stream\.)?[a-z]\w*$", path) and path not in NEEDS_NO_CUDA
]


def _raises(path: str) -> str:
    """Return the section of a docstring that lists the errors."""
    text = inspect.getdoc(PUBLIC[path]) or ""
    return text.partition("\nRaises\n------\n")[2].partition("\n\n")[0]


def test_the_page_of_common_errors_begins_with_those_of_any_call() -> None:
    (_, any_call, *_) = ERRORS_PAGE.read_text(encoding="utf-8").split("\n## ")
    assert set(re.findall(r"`(\w+)`", any_call)) >= OF_ANY_CALL


@pytest.mark.parametrize("path", LISTING)
def test_a_function_lists_the_errors_of_its_own(path: str) -> None:
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^\w.*", _raises(path), re.MULTILINE))))
    assert not named & OF_ANY_CALL, "any call raises these: they are on the page"


@pytest.mark.parametrize("path", CALLING)
def test_a_function_refers_to_the_page_of_common_errors(path: str) -> None:
    assert ":doc:`/reference/common-errors`" in _raises(path)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_documented(module: types.ModuleType) -> None:
    assert ">>> " in (module.__doc__ or "")


def test_aliases_are_documented() -> None:
    body = ast.parse(inspect.getsource(userstream.typing)).body
    documented = {
        f"userstream.typing.{name.target.id}"
        for name, text in itertools.pairwise(body)
        if isinstance(name, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert documented == set(ALIASES)
    example = userstream.typing.__doc__ or ""
    for path in ALIASES:
        assert path.rpartition(".")[2] in example


def test_the_names_are_sorted() -> None:
    own = [name for name in userstream.__all__ if name not in userstream.errors.__all__]
    assert sorted(own) == own

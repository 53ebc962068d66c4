"""Checks of CI that are no tests of the package. The standard library is enough for them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Paths of a machine and hosts of package registries have no place in what is published.
FOREIGN = re.compile(
    r"(?<![\w.$~/}-])/(root|work|home|opt|mnt|Users)/\w"
    r"|\b(pypi|test\.pypi|npmjs|crates|anaconda|conda\.anaconda)\.(org|io|com)\b"
    r"|\bpythonhosted\."
)

# Blocks of a page, by what follows the first fence, and of docstrings, which are reST.
BLOCK = r"^( *)```(.*)\n(?:.*\n)*?\1```$"
NOT_RUN = r"text|console|sh|\{(?:toctree|eval-rst|include)\}.*|\{literalinclude\} measured/.*"
UNRUN = r"^ *\.\. (?:code|code-block|sourcecode)::(?! (?:console|text)$).*$|^(?! *\.\. ).*::$"
HIDDEN = r"invisible-code|^ *\.\. testsetup::|^ +:hide:$"
NEEDS_GPU = r"^(?:From )?\[[\w.]+\]\(\S*/needs_gpu/\S+\.py\)(?!, which\s+needs\s+(?:a|two) GPU).*"
LONGEST_SUBJECT = 72
CORE = re.compile(r"userstream/_driver/_core\.(abi3|cpython-314t-\w+-linux-gnu)\.so")
NATIVE = {
    "userstream/_observe/recorder.so",
    "userstream/testing/libcuda/libcuda.so.1",
    "userstream/testing/libcuda/libnvidia-ml.so.1",
}


def text() -> None:
    """Check what people read against what is there."""
    problems = [
        *_foreign(),
        *_citation(),
        *_readme_example(),
        *_readme_links(),
        *_readme_numbers(),
        *_readme_accuracy(),
        *_code_blocks(),
        *_pictures(),
        *_dali_table(),
    ]
    print("\n".join(problems) or "text: ok")
    if problems:
        sys.exit(1)


def _files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:  # not a clone
        found = [
            path
            for path in ROOT.rglob("*")
            if not {"build", "_build", ".venv", "__pycache__"} & set(path.parts)
        ]
    return [path for path in found if path.is_file()]


def _foreign() -> Iterator[str]:
    for path in _files():
        if path == Path(__file__):
            continue
        for number, line in enumerate(
            path.read_text(encoding="utf-8", errors="replace").splitlines(), 1
        ):
            found = FOREIGN.search(line)
            if found:
                yield f"{path.relative_to(ROOT)}:{number}: names {found[0]!r}"


def _version() -> str:
    module = (ROOT / "userstream/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', module, re.MULTILINE)
    return version


def _citation() -> Iterator[str]:
    if f"\nversion: {_version()}\n" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8"):
        yield f"CITATION.cff: the version is not {_version()}"


def _readme_example() -> Iterator[str]:
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    for block in blocks:
        if not any(block == path.read_text() for path in (ROOT / "docs/examples").rglob("*.py")):
            yield f"README.md: this block is no file of docs/examples:\n{block}"


def _readme_links() -> Iterator[str]:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if "://" not in target and not (ROOT / target).exists():
            yield f"README.md: there is no {target}"


def _readme_numbers() -> Iterator[str]:
    """Yield what the table about speed says and the page about performance does not."""
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    table = README.partition("\n## Speed\n")[2].partition("\n## ")[0]
    numbers = re.findall(r"[\d.]+ (?:%|µs|ms)", table)
    if not numbers:
        yield "README.md: there is no table under 'Speed'"
    for number in numbers:
        if not re.search(rf"(?<![\d.]){re.escape(number)}", page):
            yield f"README.md: docs/performance.md does not have {number!r}"


def _readme_accuracy() -> Iterator[str]:
    """Yield what the README says of `observe` and the measured page does not."""
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    counts = re.search(
        r"^\| NVIDIA H200 \| `observe` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| 0 \|\n"
        r"\| NVIDIA H200 \| `TORCH_CUDA_SANITIZER=1` \| (\d+) \| (\d+) \|",
        page,
        re.MULTILINE,
    )
    told = re.search(
        r"Of (\d+) programs .*?finds (\d+) with both lines .*? and (\d+) more as possible races. "
        r"The other (\d+) .*?finds (?P<found>\d+) of the (?P<all>\d+) that use PyTorch",
        README.replace("\n", " "),
    )
    if (
        not counts
        or not told
        or counts.groups() != (*told.groups()[:4], told["all"], told["found"])
    ):
        yield "README.md: what it says of `observe` is not in docs/accuracy.md"


def _code_blocks() -> Iterator[str]:
    """Yield code that nothing runs, examples whose captions are incomplete, and front matter."""
    for path in _files():
        name = str(path.relative_to(ROOT))
        if not re.fullmatch(r"docs/.*\.md|userstream/.*\.py|[^/]*\.md", name):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            # docs/conftest.py runs Python, or compares it with a file that is run; so do
            # _readme_example and tests/project/test_contributing.py.
            python = name.startswith("docs/") or name in {"README.md", "CONTRIBUTING.md"}
            kinds = [kind for _, kind in re.findall(BLOCK, text, re.MULTILINE)]
            unrun = [
                f"```{kind}"
                for kind in kinds
                if not (re.fullmatch(NOT_RUN, kind) or (kind == "python" and python))
            ]
            if text.startswith("---"):
                yield f"{name}: repository viewers show front matter: write <!-- keywords: ... -->"
            if "```{toctree}" in re.sub(r"(?s)<!--.*?-->", "", text):
                yield f"{name}: repository viewers show a toctree: write <!-- navigation ... -->"
            for line in re.findall(NEEDS_GPU, text, re.MULTILINE):
                yield f"{name}: does not say that the program needs a GPU: {line}"
        else:
            unrun = re.findall(UNRUN, text, re.MULTILINE)
        yield from (f"{name}: nothing runs {line.strip()!r}: write ```python" for line in unrun)
        if re.search(HIDDEN, text, re.MULTILINE):
            yield f"{name}: its examples need code that it hides from whoever types them"


def _pictures() -> Iterator[str]:
    drawn = subprocess.run(
        [sys.executable, str(ROOT / "docs/pictures"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    if drawn.returncode:
        yield (drawn.stdout + drawn.stderr).strip()


def _dali_table() -> Iterator[str]:
    table = (ROOT / "docs/reference/dali-parity.md").read_text(encoding="utf-8")
    tests = (ROOT / "tests/project/test_dali_parity.py").read_text(encoding="utf-8")
    yield from _differences(
        "docs/reference/dali-parity.md",
        set(re.findall(r"`(test_\w+)`", table)),
        set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE)),
    )


def _differences(page: str, described: set[str], there: set[str]) -> Iterator[str]:
    for name in sorted(there - described):
        yield f"{page}: lacks {name}"
    for name in sorted(described - there):
        yield f"{page}: {name} does not exist"


def release(tag: str) -> None:
    """Check that a tag names the version that is here, and that the changelog has it."""
    if tag != f"v{_version()}":
        sys.exit(f"the tag is {tag}, and userstream.__version__ is {_version()}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(
        rf"^## \[{re.escape(_version())}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE
    ):
        sys.exit(f"CHANGELOG.md has no heading with a date for {_version()}")


def commits(span: str) -> None:
    """Check the subjects of the commits in a span of git, such as ``main..HEAD``."""
    log = subprocess.check_output(
        ["git", "log", "--no-merges", "--format=%h %s", span], cwd=ROOT, text=True
    )
    problems = [
        f"{number}: the subject has {len(subject)} characters, not at most {LONGEST_SUBJECT}"
        for number, _, subject in (line.partition(" ") for line in log.splitlines())
        if len(subject) > LONGEST_SUBJECT
    ]
    print("\n".join(problems) or f"{len(log.splitlines())} commits: ok")
    if problems:
        sys.exit(1)


def dist(directory: str) -> None:
    """Check what the wheel and the sdist in a directory contain."""
    (wheel,) = Path(directory).glob("*.whl")
    (sdist,) = Path(directory).glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    public = {name for name in _names() if not name.startswith(".")}  # what CI and git have is not
    in_sdist -= {".gitignore", "PKG-INFO"}
    problems = [
        *_problems_of_wheel(wheel, "cp311-abi3"),
        *(f"the sdist lacks {name}" for name in sorted(public - in_sdist)),
        *(f"the sdist has {name}" for name in sorted(in_sdist - public)),
    ]
    print("\n".join(problems) or f"{wheel.name}: ok")
    if problems:
        sys.exit(1)


def wheels(directory: str) -> None:
    """Check the wheels of a release for one architecture."""
    problems = []
    found = sorted(Path(directory).glob("*.whl"))
    for kind in ("cp311-abi3", "cp314-cp314t"):
        of_kind = [wheel for wheel in found if f"-{kind}-manylinux" in wheel.name]
        if len(of_kind) != 1:
            problems.append(f"{len(of_kind)} wheels are {kind}: {[each.name for each in found]}")
        for wheel in of_kind:
            problems += _problems_of_wheel(wheel, kind)
    if len(found) != 2:
        problems.append(f"two wheels were expected: {[each.name for each in found]}")
    print("\n".join(problems) or "wheels: ok")
    if problems:
        sys.exit(1)


def _names() -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in _files()}


def _problems_of_wheel(wheel: Path, kind: str) -> Iterator[str]:
    if f"-{kind}-" not in wheel.name:
        yield f"{wheel.name} is not {kind}"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    everything = {name for name in names if not re.search(r"/$|\.dist-info/", name)}
    cores = {name for name in everything if CORE.fullmatch(name)}
    if len(cores) != 1:
        yield f"{wheel.name} has {len(cores)} compiled cores"
    found = everything - cores
    package = NATIVE | {
        name
        for name in _names()
        if re.match(r"userstream/|pytest_userstream\.py$", name) and name[-2:] not in (".c", ".h")
    }
    yield from (f"{wheel.name} lacks {name}" for name in sorted(package - found))
    yield from (f"{wheel.name} has {name}" for name in sorted(found - package))


def benchmarks(results: str, chart: str) -> None:
    """Check that a run of the benchmarks left out only what needs a GPU, and drew the rest."""
    report = json.loads(Path(results).read_text(encoding="utf-8"))
    measured = {row["case"] for row in report["rows"]}
    cases = report["seconds"].keys()
    problems = [f"{name} failed: {why}" for name, why in report["failed"].items()]
    problems += [f"{name} measured nothing" for name in cases - measured - report["skipped"].keys()]
    for row in report["rows"]:
        for name, call in row["calls"].items():
            if not call["samples"] or not all(map(math.isfinite, call["samples"])):
                problems.append(f"{row['name']}: {name} has the samples {call['samples']}")
    drawn = "".join(ElementTree.parse(chart).getroot().itertext())
    compared = [
        row["name"]
        for row in report["rows"]
        if any(each["kind"] == "ratio" and each.get("limit") for each in row["compared"])
        and not row["case"].startswith(("growth.", "importing."))  # beside itself
    ]
    problems += [f"{chart} lacks {name}" for name in compared if name not in drawn]
    if not compared or not report["where"]["gpus"]:
        problems.append(f"{results} compares nothing, or knows no device")
    print("\n".join(problems) or f"benchmarks: {len(measured)} of {len(cases)} cases measured, ok")
    if problems:
        sys.exit(1)


if __name__ == "__main__":
    check = {
        "text": text,
        "release": release,
        "commits": commits,
        "dist": dist,
        "wheels": wheels,
        "benchmarks": benchmarks,
    }
    check[sys.argv[1]](*sys.argv[2:])

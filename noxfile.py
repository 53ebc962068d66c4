"""Everything that has to hold, without a GPU; `bash .ci/run` runs all of it.

A session alone: `nox -s lint`. Environments, logs and results are under build/, which git ignores.
"""

from __future__ import annotations

import compileall
import filecmp
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
CI = ROOT / "build" / "ci"
# The same order each time, so that only the change decides what fails; `soak` looks for more.
ORDERED = {"PYTEST_ADDOPTS": "-p no:randomly --durations=30"}
# Only the tests that failed. If none has, as when the run was cut off, that is an error as well.
AGAIN = ("--last-failed", "--last-failed-no-failures=none", "-v")
# Linters, type checkers and tools of releases: their versions are stated there alone.
PINS = ("-c", str(ROOT / ".ci/pins.txt"))

# The README's test command runs the tests of the simulated driver, and no other session does.
LIBRARY = ("tests", "--ignore=tests/testing")
# Without each driver call failing once, everywhere, which takes long.
WITHOUT_FAULTS = (*LIBRARY, "--ignore=tests/driver/test_faults_internal.py")
# What users meet first: a quarter of a minute, for the package as it is installed.
FIRST = (
    *("project/test_architecture", "project/test_bad_input", "project/test_contributing"),
    *("project/test_public_names", "buffers/test_buffers", "copies/test_copies"),
    *("driver/test_errors", "ordering/test_ordering", "registry/test_registry"),
    "stream/test_stream",
)
# What queues work on streams, and so could race: some three minutes.
QUEUING = (
    *("tests/copies/test_asnumpy.py", "tests/copies/test_copies.py"),
    *("tests/copies/test_odd_arrays.py", "tests/copies/test_queued_copies.py"),
    *(
        "tests/copies/test_spans.py",
        "tests/engine/test_async.py",
        "tests/engine/test_asyncio.py",
        "tests/engine/test_lane_internal.py",
    ),
    *("tests/engine/test_wait.py", "tests/ordering/test_order_fuzz.py"),
    *("tests/ordering/test_activation.py", "tests/ordering/test_captures.py"),
    *("tests/ordering/test_held_buffers.py", "tests/ordering/test_held_buffers_internal.py"),
    "tests/ordering/test_order_internal.py",
    *("tests/ordering/test_ordering.py", "tests/ordering/test_producers.py"),
    *("tests/ordering/test_uses.py", "tests/ordering/test_way_back.py"),
    *("tests/stream/test_capture.py", "tests/stream/test_host_functions.py"),
    *("tests/stream/test_capture_internal.py", "tests/stream/test_host_functions_internal.py"),
    "tests/stream/test_stream_internal.py",
    *("tests/stream/test_stream.py", "tests/stream/test_stream_capture.py"),
    *("tests/stream/test_stream_values.py", "tests/conformance"),
    *("tests/testing/test_conditions.py", "tests/testing/test_kernels.py"),
)

# What other projects' tests need beside them; see `judges`.
JUDGED = {
    "cuda_core": (
        *("cuda-core==1.2.0", "cuda-bindings==13.4.4"),
        *("nvidia-cuda-nvrtc", "nvidia-nvjitlink", "cloudpickle"),
    ),
    "numba_cuda": (
        *("numba-cuda==0.30.4", "numpy<2.4", "nvidia-cuda-nvrtc", "nvidia-cuda-nvcc"),
        *("nvidia-nvjitlink", "cffi", "filecheck", "psutil", "pytest-benchmark"),
    ),
}

nox.options.envdir = "build/nox"
nox.options.default_venv_backend = "virtualenv"  # takes a tenth of the time of venv
os.environ.setdefault("USERSTREAM_TEST_DRIVER", "simulated")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types and the words that people read."""
    session.install(*PINS, *_checkout("dev"), "ruff", "mypy", "pyright[nodejs]", "pre-commit")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("pyright")
    session.run("pyright", "--verifytypes", "userstream", "--ignoreexternal", silent=True)
    session.run(
        "pytest", "-q", "tests/project/test_public_names.py", env=ORDERED
    )  # numpydoc is only here
    session.run("pre-commit", "validate-config", ".pre-commit-config.yaml")
    session.run("python", ".ci/checks.py", "text")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, and everything in it that runs; that the benchmarks measure.

    The tests of Dask as well, for which no other session has `distributed`.
    """
    session.install(*_checkout("docs,test,engines"), "matplotlib>=3.10")
    shutil.rmtree(ROOT / "docs/reference/generated", ignore_errors=True)
    sphinx = ("python", "-m", "sphinx", "-q", "-n", "-W", "-b")
    session.run(*sphinx, "html", "docs", f"{CI}/docs/html")
    session.run(*sphinx, "doctest", "docs", f"{CI}/docs/doctest")
    _run_tests(session, "docs")
    _run_tests(session, "tests/processes/test_dask.py")
    session.run("python", "docs/run_examples.py")
    results, chart = f"{CI}/benchmarks.json", f"{CI}/benchmarks.svg"
    quick = ("--quick", "--simulate", "--json", results, "--chart", chart)
    session.run("python", "-m", "benchmarks", *quick, silent=True)
    session.run("python", ".ci/checks.py", "benchmarks", results, chart)


@nox.session
def races(session: nox.Session) -> None:
    """The tests that queue work, each of them watched by `observe`: a race fails it."""
    session.install(*_checkout("test"))
    _run_tests(session, "--races", *QUEUING)


@nox.session
def browsers(session: nox.Session) -> None:
    """The page of `observe` in Chromium and Firefox, with the rules of axe.

    It is not part of `.ci/run`: both browsers have to be installed, and npm, which gets axe.
    """
    session.install(*_checkout("test"))
    npm = CI / "npm"
    npm.mkdir(parents=True, exist_ok=True)
    session.run("npm", "install", "--silent", "--prefix", str(npm), "axe-core@4", external=True)
    axe = {"USERSTREAM_AXE": f"{npm}/node_modules/axe-core/axe.min.js", "USERSTREAM_BROWSERS": "1"}
    session.run("pytest", "-q", "tests/observe/test_page.py", env={**ORDERED, **axe})


@nox.session
def sanitizers(session: nox.Session) -> None:
    """The compiled parts under ASAN, UBSAN and TSAN."""
    session.install(*_checkout("test"))
    env = {**ORDERED, "USERSTREAM_SANITIZERS": "1"}
    _run_tests(session, "tests/testing/test_sanitizers.py", env=env)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The lowest version of everything that the package allows; what follows ``--``: as below."""
    session.install(*_checkout("test"), *_lowest_pins())
    _run_tests(session, *(session.posargs or LIBRARY))


@nox.session(python=["3.11", "3.12", "3.13", "3.14", "3.14t"])
@nox.parametrize("cuda", ["12", "13"])
def tests(session: nox.Session, cuda: str) -> None:
    """The newest versions for one Python and one CUDA; what follows ``--`` goes to pytest."""
    session.install(*_checkout("test"), f"cuda-python=={cuda}.*", "cuda-core")
    # cuda-bindings is released before the cuda-python that allows it.
    session.install("--upgrade", "--no-deps", f"cuda-bindings=={cuda}.*")
    _run_tests(session, *(session.posargs or WITHOUT_FAULTS))


@nox.session(python=False)
def readme_run(session: nox.Session) -> None:
    """The README's command that installs and checks, word for word in a fresh clone."""
    clone = _fresh_clone("clone-run")
    with session.chdir(clone):
        session.run("bash", "-c", _readme_command("-m userstream"))


@nox.session(python=False)
def readme_test(session: nox.Session) -> None:
    """The README's test command, word for word in a fresh clone, with coverage."""
    clone = _fresh_clone("clone-test")
    # Or with PYTHONDONTWRITEBYTECODE, every process that a test starts would compile the package.
    compileall.compile_dir(clone / "userstream", quiet=1)
    data = CI / "coverage"  # of the processes that the tests start as well
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    env = {
        **ORDERED,
        "COVERAGE_FILE": f"{data}/data",
        "COVERAGE_PROCESS_START": f"{clone}/pyproject.toml",
    }
    with session.chdir(clone):
        command = ("bash", "-c", _readme_command("-m pytest"))
        _run_twice(session, command, (".venv/bin/python", "-m", "pytest"), env)
        coverage = (".venv/bin/python", "-m", "coverage")
        session.run(*coverage, "combine", "-q", env=env)
        session.run(*coverage, "report", "--fail-under=95", env=env)


@nox.session
def package(session: nox.Session) -> None:
    """The wheel and the sdist: the same bytes wherever they are built, and what they install."""
    session.install(*PINS, "build", "twine", "validate-pyproject[all]")
    session.run("validate-pyproject", "pyproject.toml")
    dist = _build_twice(session)
    session.run("twine", "check", "--strict", *map(str, dist.iterdir()))
    session.run("python", ".ci/checks.py", "dist", str(dist))


@nox.session
def installed(session: nox.Session) -> None:
    """The wheel of `package`, installed without a compiler, with the tests of the sdist."""
    (wheel,) = (CI / "dist").glob("*.whl")
    (sdist,) = (CI / "dist").glob("*.tar.gz")
    # What the environment has, and nothing else of this machine.
    alone = {**ORDERED, "CC": "false", "PATH": session.bin}
    session.install("--only-binary", ":all:", f"{wheel}[test]", env=alone)
    away = CI / "away"  # where the package itself is not
    shutil.rmtree(away, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(away, filter="data")
    (away,) = away.iterdir()
    shutil.rmtree(away / "userstream")
    with session.chdir(away):
        where = "import userstream as u; assert 'site-packages' in u.__path__[0], u.__path__"
        session.run("python", "-c", where, env=alone)
        session.run("python", "-m", "userstream", "--simulate", env=alone)
        observed = ("observe", "--simulate", "docs/examples/first.py")
        session.run("python", "-m", "userstream", *observed, env=alone)
        _run_tests(session, "docs/examples/pytest", env=alone)
        _run_tests(session, *(f"tests/{name}.py" for name in FIRST), env=alone)


@nox.session
def mutation(session: nox.Session) -> None:
    """Count the changes of the code that the tests notice: of 400, or of ``-- PACKAGE COUNT``.

    It is not part of `.ci/run`.
    """
    session.install(*PINS, *_checkout("test"), "cosmic-ray")
    session.run("python", ".ci/mutation.py", *session.posargs)


@nox.session(python="3.12")
def judges(session: nox.Session) -> None:
    """Other projects' tests, on the simulated driver: `nox -s judges -- CHECKOUT...`.

    A checkout of cuda-python, at the release of cuda.core that is installed here, or of numba-cuda.
    Nothing of it is changed. `tests/judges` has the stand-ins for its kernels and the tests that
    fail, with the reasons.
    """
    for checkout in map(Path, session.posargs):
        judge = "cuda_core" if (checkout / "cuda_core").is_dir() else "numba_cuda"
        session.install(*_checkout("cu13"), "pytest<9", "pytest-timeout", *JUDGED[judge])
        paths = [ROOT, ROOT / "tests/judges"]
        if judge == "cuda_core":
            tests = [str(checkout / "cuda_core/tests")]
            for without in ("system", "example_tests", "cython"):
                tests.append(f"--ignore={tests[0]}/{without}")
        else:
            paths.append(checkout / "testing")
            tests = ["-c", str(checkout / "testing/pytest.ini"), "-o", "addopts=", "-p", "conftest"]
            tests += ["-o", "filterwarnings=", "--pyargs", "numba.cuda.tests.cudadrv"]
        known = ROOT / f"tests/judges/{judge}.txt"
        options = ("-q", "-p", "judge", f"--judged-by={known}", "--tb=line", "--timeout=120")
        session.chdir(session.create_tmp())  # the checkout would hide what is installed
        env = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "USERSTREAM_JUDGE": f"{judge}_kernels",
        }
        session.run("pytest", *options, "-p", "no:cacheprovider", *tests, env=env)
        session.chdir(ROOT)


@nox.session
def soak(session: nox.Session) -> None:
    """All tests in random order, over and over, a storm of signals, random uses, `observe`.

    It is not part of `.ci/run`.
    """
    session.install(*_checkout("test"))
    # 100,000 in all, for each of some forty functions.
    session.run(
        "pytest", "-q", "tests/engine/test_interrupts.py", env={"USERSTREAM_INTERRUPTS": "2700"}
    )
    session.run(
        "pytest", "-q", "tests/driver/test_core_internal.py", env={"USERSTREAM_CALLS": "1000000"}
    )
    session.run(
        "pytest",
        "-q",
        "tests/engine/test_wake_ups_internal.py",
        env={"USERSTREAM_WAITS": "1000000"},
    )
    # Ten minutes for each of eight uses.
    fuzz = ("tests/ordering/test_order_fuzz.py", "tests/observe/test_fuzz.py")
    fuzz += ("tests/testing/test_fuzz.py",)
    session.run("pytest", "-q", "-o", "timeout=900", *fuzz, env={"USERSTREAM_FUZZ": "600"})
    hour = ("python", "tests/soak.py", os.environ.get("USERSTREAM_SOAK_SECONDS", "3600"))
    session.run(*hour, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"})
    thorough = {"USERSTREAM_STORM": "30", "USERSTREAM_THOROUGH": "1"}
    for _ in range(int(os.environ.get("USERSTREAM_SOAK", "20"))):
        session.run("pytest", "-q", "tests", env=thorough)


def _checkout(extras: str) -> tuple[str, ...]:
    """Return what pip installs for the checkout: as `.ci/run` has built it, or built anew."""
    built = os.environ.get("USERSTREAM_CHECKOUT")
    return (f"{built}[{extras}]",) if built else ("-e", f".[{extras}]")


def _run_tests(session: nox.Session, *arguments: str, env: dict[str, str] = ORDERED) -> None:
    # Or with PYTHONDONTWRITEBYTECODE, every process that a test starts would compile the package.
    session.run("python", "-m", "compileall", "-q", f"{ROOT}/userstream")
    pytest = ("pytest", "-q", "-o", f"cache_dir={session.virtualenv.location}/cache", *arguments)
    _run_twice(session, (*pytest, "--cache-clear"), pytest, env)


def _run_twice(
    session: nox.Session, command: tuple[str, ...], pytest: tuple[str, ...], env: dict[str, str]
) -> None:
    """Run a command that runs tests; those that failed run once more, by themselves, and decide.

    Machines that run this are shared, and some tests have to do with time. Both runs are printed.
    """
    try:
        session.run(*command, env=env)
    except CommandFailed as failure:
        if failure.return_code != 1:  # the tests did not all run
            raise
        session.run(*pytest, *AGAIN, env=env)


def _readme_command(end: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE)
    (command,) = (block for block in blocks if block.endswith(end))
    if "\n" in command:
        raise ValueError(f"README.md: the command is more than one line: {command}")
    return command


def _fresh_clone(name: str) -> Path:
    """Copy the files that git would have there, and nothing else."""
    clone = CI / name
    shutil.rmtree(clone, ignore_errors=True)
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for file in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if file and (ROOT / file).is_file():
            (clone / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, clone / file)
    return clone


def _lowest_pins() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pairs = (re.match(r"([\w-]+)>=([\d.]+)", each) for each in project["dependencies"])
    return [f"{pair[1]}=={pair[2]}" for pair in pairs if pair]


def _build_twice(session: nox.Session) -> Path:
    """Build as releases are built, twice: other folder, times and umask must not matter."""
    time = subprocess.check_output(("git", "log", "-1", "--format=%ct"), cwd=ROOT, text=True)
    env = {"SOURCE_DATE_EPOCH": time.strip()}
    dist, again = CI / "dist", CI / "dist-again"
    for out, umask in ((dist, 0o022), (again, 0o077)):
        shutil.rmtree(out, ignore_errors=True)
        clone = _fresh_clone(f"clone-{out.name}")
        if out is again:
            for file in clone.rglob("*"):
                os.utime(file, (10**9, 10**9))
        before = os.umask(umask)
        try:
            build = ("python", "-m", "build", "--outdir", str(out), str(clone))
            session.run(*build, env=env, silent=True)
        finally:
            os.umask(before)
    _, different, missing = filecmp.cmpfiles(
        dist, again, [each.name for each in dist.iterdir()], shallow=False
    )
    if different or missing:
        session.error(f"built again, these differ: {different + missing}")
    return dist

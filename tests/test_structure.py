"""The shape of the package: imports go one way, modules stay small, importing it does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paddlenlp_nebula

PACKAGE = Path(paddlenlp_nebula.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the bottom to the top: a module imports from its own layer (its own folder, that is) and from lower
# ones. Those in one line do not know each other.
LAYERS = [
    ["errors", "forking", "atomic"],
    ["security"],
    ["transport"],
    ["link"],
    ["codec"],
    ["tensors"],
    ["adapters"],
    ["selection"],
    ["buckets"],
    ["backend"],
    ["privacy"],
    ["strategy", "local", "ledger", "sharding", "batches"],
    ["arguments"],
    ["hybrid"],
    ["hello", "void_step", "evaluation", "doubts"],
    ["jump"],
    ["run"],
    ["checkpoint"],
    ["rounds"],
    ["farewell"],
    ["callback"],
    ["trainer"],
    ["distill"],
    ["__init__"],  # the public names, from anywhere above
    ["data", "bench"],
    ["recipe"],
    ["launch"],
    ["cli"],
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> Iterator[str]:
    """Names below the package that a module imports, at its top or later."""
    folders = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = folders[: len(folders) - (node.level - 1)]
            names = [".".join([PACKAGE.name, *base, *filter(None, [node.module])])]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.split(".")[0] == PACKAGE.name:
                yield name.removeprefix(PACKAGE.name).lstrip(".") or "__init__"


def top(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_follow_the_arrow(path: Path) -> None:
    own = top(dotted(path))
    assert own in LAYER, f"{own} needs a place in LAYERS"
    if path == PACKAGE / "__init__.py":
        return  # loads the public names on first use
    against = [
        name for name in imports(path) if top(name) != own and not LAYER[top(name)] < LAYER[own] and name != "__init__"
    ]
    assert not against, f"{dotted(path)} imports from above or beside it: {against}"


def test_the_public_names_are_known_only_above_them() -> None:
    users = {top(dotted(path)) for path in MODULES if "__init__" in imports(path)}
    assert all(LAYER[user] > LAYER["__init__"] for user in users), users


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_modules_fit_on_a_few_screens(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    assert path.stem not in ("utils", "util", "helpers", "misc")
    if path.name != "__main__.py":
        assert ast.get_docstring(tree(path)), f"{dotted(path)} does not say what it is"


DANGEROUS_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
DANGEROUS_CALLS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_no_code_comes_from_data(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            assert not DANGEROUS_MODULES & {top(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert top(node.module or "") not in DANGEROUS_MODULES
        elif isinstance(node, ast.Call):
            assert not (isinstance(node.func, ast.Name) and node.func.id in DANGEROUS_CALLS), ast.unparse(node)
            assert ast.unparse(node.func) not in ("os.system", "os.popen"), ast.unparse(node)
            for keyword in node.keywords:
                assert keyword.arg not in ("shell", "allow_pickle") or ast.unparse(keyword.value) == "False"


# mpi4py's lower-case methods pickle.
PICKLING = {"send", "recv", "isend", "irecv", "ssend", "issend", "bcast", "scatter", "gather", "allgather", "alltoall"}
PICKLING |= {"reduce", "allreduce", "sendrecv", "scan"}


@pytest.mark.parametrize("path", [path for path in MODULES if "MPI" in path.read_text()], ids=dotted)
def test_mpi_only_through_buffers(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PICKLING:
            owner = ast.unparse(node.func.value)
            assert not any(word in owner.lower() for word in ("comm", "mpi")), ast.unparse(node)


def in_a_fresh_interpreter(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


LIGHT = ["arguments", "errors", "forking", "ledger.ledger", "codec.registry", "launch.roster", "cli.main"]
LIGHT += ["distill.agreement", "distill.arguments", "distill.knowledge.registry", "distill.losses.spec"]
LIGHT += [
    dotted(path)
    for path in MODULES
    if path.parent.name in ("security", "link", "transport") and path.stem != "__init__"
]
LIGHT.remove("transport.pump")  # runs where MPI has been started on purpose


def test_importing_starts_nothing_and_loads_nothing_heavy() -> None:
    """Neither Paddle nor MPI nor a compiler, no thread, no handler, no random number drawn, no logger touched."""
    program = f"""
import logging, random, signal, sys, threading, warnings
random.seed(1); state = random.getstate()
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
loggers = dict(logging.root.manager.loggerDict), list(logging.root.handlers)
hook, filters = sys.excepthook, list(warnings.filters)
import paddlenlp_nebula
paddlenlp_nebula.NebulaArguments
from importlib import import_module
for name in {LIGHT!r}:
    import_module("paddlenlp_nebula." + name)
assert threading.active_count() == 1, threading.enumerate()
assert state == random.getstate()
assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]
assert not {{name for name in logging.root.manager.loggerDict if "nebula" in name}} and loggers[1] == logging.root.handlers
assert sys.excepthook is hook
heavy = {{"paddle", "paddlenlp", "mpi4py.MPI", "torch", "datasets", "numba"}} & set(sys.modules)
print(sorted(heavy))
"""
    assert in_a_fresh_interpreter(program) == "[]"


def test_the_public_names() -> None:
    assert in_a_fresh_interpreter(
        "import paddlenlp_nebula as n; print(dir(n), n.NebulaArguments.__module__, hasattr(n, 'nothing'))"
    ) == ("['NebulaArguments', 'NebulaCallback', 'NebulaTrainer', '__version__'] paddlenlp_nebula.arguments False")

"""The borders of the design and the budget of the style guide: who imports whom, and how long things get.

A new file in tiers/ is added to GROUPS here, which is the moment to ask whether it stands in the right place.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("tiers", "connector", "engine", "service")

GROUPS: Final = {
    "basics": {
        "__init__",
        "errors",
        "shape",
        "tier",
        "checksum",
        "chain",
        "identity",
        "key_schemes",
        "config",
        "config_router",
        "config_values",
        "quantities",
        "finding",
        "memory",
        "breaker",
    },
    "pool": {"metrics", "policy", "index", "changes", "links", "idle", "slots", "lease", "pool", "replay"},
    "device": {"device"},
    "host": {"host"},
    "file": {
        "file_io",
        "slab",
        "slab_file",
        "slab_changes",
        "slab_check",
        "slab_space",
        "slab_writer",
        "extents",
        "payload_io",
        "group_sync",
        "file_store",
    },
    "transfer": {"transfer", "block_copier", "engine_blocks", "packer", "cuda_transfer", "kernels"},
    "redis": {
        "redis_doctor",
        "redis_options",
        "redis_nodes",
        "redis_stream",
        "redis_wire",
        "redis_records",
        "redis_lanes",
        "redis_batch",
        "redis_changes",
        "redis_epoch",
        "redis_names",
        "redis_store",
    },
    "hierarchy": {
        "opening",
        "below",
        "local_tiers",
        "hierarchy",
        "locate",
        "prefetch",
        "progress",
        "demote",
        "port",
        "io_queue",
        "rates",
        "events",
        "inventory",
        "evict",
    },
}
# Tiers never import each other; copies know L2's region; the hierarchy alone knows them all.
MAY_IMPORT: Final = {
    "basics": {"basics"},
    "pool": {"basics", "pool"},
    "device": {"basics", "pool", "device"},
    "host": {"basics", "pool", "host"},
    "file": {"basics", "pool", "file"},
    "redis": {"basics", "pool", "redis"},
    "transfer": {"basics", "pool", "host", "transfer"},
    "hierarchy": set(GROUPS),
}
PACKAGE_MAY_IMPORT: Final = {
    "tiers": {"tiers"},
    "connector": {"tiers", "connector"},
    "engine": {"tiers", "connector", "engine"},
    "service": {"tiers", "connector", "service"},
}
SERVERS: Final = "engine/server"  # these files serve an engine over HTTP: a service themselves
TORCH_FILES: Final = {
    *(f"tiers/{name}.py" for name in ("device", "host", "transfer", "packer", "cuda_transfer", "kernels")),
    "connector/worker.py",
    "connector/hf_model.py",
    "connector/transformers.py",
    *(f"connector/{name}.py" for name in ("vllm", "vllm_model", "vllm_worker")),
    *(f"engine/{name}.py" for name in ("model", "model_runner", "llm", "demo_worker", "generate", "server_process")),
}
# Named after the engine they adapt, by the design; nobody runs them from their folder.
ADAPTERS: Final = tuple(f"{home}connector/{name}.py" for home in ("", "kvtier/") for name in ("transformers", "sglang"))
# Past the budget, with the reason. The keys are the places that `test_style_budget` prints.
EXPLAINED: Final = {
    "tiers/file_store.py:open": "the tier's whole configuration; every caller names each",
    "service/serve_cli.py:kvtier.service.http_app": "starlette and uvicorn are the extra `service`",
    "service/serve_cli.py:kvtier.service.http_server": "the same",
    "service/route_cli.py:kvtier.service.router_app": "starlette and uvicorn are the extra `service`",
    "service/serve_cli.py:kvtier.service.events": "so is pyzmq",
    "service/events.py:_run:except": "top of the worker loop: a batch that fails is counted, the thread lives on",
    "service/event_consumer.py:_run:except": "top of the worker loop: what failed is counted and read anew",
    "service/admin_cli.py:kvtier.service.http_client": "httpx2 is the extra `service`",
    "engine/server_cli.py:kvtier.engine.server_process": "torch and transformers take seconds to import",
    "engine/server_loop.py:_admit:except": "the same: what fails while a request is taken in is that request's alone",
    "engine/server_loop.py:_step:except": "top of the worker loop: a failed step is counted, its requests are told",
    "kvtier/cli.py:kvtier.engine.demo": "torch and transformers take seconds to import; few verbs need them",
    "kvtier/cli.py:kvtier.engine.generate": "the same",
    "kvtier/cli.py:run_generate": "one parameter for each option of the command line",
    "tiers/hierarchy.py:Hierarchy": "the whole store's verbs, on one lock and one list of tiers",
    "tiers/below.py:TiersBelow": "all that a connector may ask, here or of a daemon, in one list",
    "tiers/local_tiers.py:LocalTiers": "implements that list",
    "connector/remote.py:RemoteTiers": "implements that list",
    "tiers/pool.py:SlotPool": "one lock, one law: the verbs of a slot's life belong together",
    "tiers/io_queue.py:_work:except": "top of the worker loop: a failed job is counted, the thread lives on",
    "service/router_replicas.py:look:except": "whatever a replica says, it is looked at again",
    "service/loop.py:_settle:except": "what a call ended with is its caller's, who waits for it on another thread",
    "service/daemon.py:aside:except": "top of a thread: what it ended with is handed to whoever started it",
    "service/daemon.py:run:except": "the same",
    "service/session.py:_receive:except": "one client's words must not end the others' service: it is cut off, counted",
    "connector/vllm.py:KVTierConnector": "vLLM's interface, whose methods these are; each is a line or two",
    "connector/tokenizer.py:load_tokenizer:except": "tokenizers raises no narrower type for a file that is none",
    "tiers/transfer.py:_work:except": "top of the worker loop: a failed copy is reported, the thread lives on",
}

Function: Final = ast.FunctionDef | ast.AsyncFunctionDef


class Import(NamedTuple):
    """One import: what is imported (dotted), where, and whether at the top of the file."""

    name: str
    path: str
    line: int
    place: str  # "top", "typing", "block"


@cache
def sources() -> dict[str, ast.Module]:
    """Path (relative, posix) to syntax tree of every file of ours in the packages and of kvtier/ itself."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    paths += (ROOT / "kvtier").glob("*.py")
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(paths)}


def imports(path: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of a file, wherever it stands; `from package import module` counts as the module."""
    places = {id(node): "top" for node in tree.body}
    for block in tree.body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            places |= {id(node): "typing" for node in block.body}
    for node in ast.walk(tree):
        place = places.get(id(node), "block")
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, path, node.lineno, place) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = f"{inner.removeprefix('kvtier.').replace('.', '/')}.py" in sources()
                yield Import(inner if is_module else str(node.module), path, node.lineno, place)


def all_imports() -> list[Import]:
    return [found for path, tree in sources().items() for found in imports(path, tree)]


def ours(found: Import) -> tuple[str, str] | None:
    """(package, module) of an import of ours, else None."""
    match found.name.split("."):
        case ["kvtier", package] if package in PACKAGES:
            return package, "__init__"
        case ["kvtier", package, module, *_] if package in PACKAGES:
            return package, module
    return None


def test_packages_import_downwards_only() -> None:
    wrong = []
    for found in all_imports():
        package = found.path.split("/")[0]
        if package == "kvtier" or not found.name.startswith("kvtier"):
            continue
        target = ours(found)
        allowed = PACKAGE_MAY_IMPORT[package] | ({"service"} if found.path.startswith(SERVERS) else set())
        if target is None or target[0] not in allowed:
            wrong.append(f"{found.path}:{found.line} imports {found.name}")
    assert not wrong, "\n".join(wrong)


def test_every_module_of_tiers_has_its_group() -> None:
    here = {path.stem for path in (ROOT / "tiers").glob("*.py")}
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert not here - set(grouped), "add it to GROUPS in this file, and ask whether it stands in the right place"


def test_tiers_do_not_know_each_other() -> None:
    group_of = {module: group for group, modules in GROUPS.items() for module in modules}
    wrong = []
    for found in all_imports():
        target = ours(found)
        package, *_, file = found.path.split("/")
        if package != "tiers" or target is None:
            continue
        group, other = group_of.get(file.removesuffix(".py")), group_of.get(target[1])
        if group and other and other not in MAY_IMPORT[group]:  # without a group: the test above
            wrong.append(f"{found.path}:{found.line} ({group}) imports {found.name} ({other})")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for found in all_imports():
        target = ours(found)
        module = found.path.removesuffix(".py").replace("/", ".")
        if target is not None and ".".join(target) != module:
            graph.setdefault(module, set()).add(".".join(target))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' → '.join(error.args[1])}")


def test_torch_only_where_tensors_are() -> None:
    # naming a type for the type checker loads nothing
    wrong = [
        f"{found.path}:{found.line} imports {found.name}"
        for found in all_imports()
        if found.name.split(".")[0] in ("torch", "cupy", "transformers")
        and found.path not in TORCH_FILES
        and found.place != "typing"
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_a_second_copy() -> None:
    programs = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    everything = sources() | {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in programs}
    wrong = [
        f"{path}:{found.line} import {found.name}: write kvtier.{found.name}"
        for path, tree in everything.items()
        for found in imports(path, tree)
        if found.name.split(".")[0] in PACKAGES
    ]
    assert not wrong, "\n".join(wrong)
    assert not set(PACKAGES) & set(sys.modules)
    for package in PACKAGES:
        assert (ROOT / "kvtier" / package).readlink() == Path("..", package)


def test_no_file_hides_a_library() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*requirements["dependencies"], *chain.from_iterable(requirements["optional-dependencies"].values())]
    distributions = {re.split(r"[<>=\[; ]", requirement)[0].replace("_", "-").lower() for requirement in asked}
    libraries = set(sys.stdlib_module_names) | {
        name
        for name, owners in metadata.packages_distributions().items()
        if any(owner.replace("_", "-").lower() in distributions for owner in owners)
    }
    folders = (*PACKAGES, "kvtier", "tests", "benchmarks")
    named = {path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.stem != "__init__"}
    named -= {ROOT / path for path in ADAPTERS}
    hiding = sorted(path.relative_to(ROOT).as_posix() for path in named if path.stem in libraries)
    assert not hiding, f"{hiding}: a file run from its folder would hide the library of that name"


def test_environment_is_read_in_config_alone() -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if path != "tiers/config.py"
        and isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
    ]
    assert not wrong, wrong


def test_no_pickle() -> None:
    wrong = [found for found in all_imports() if found.name.split(".")[0] in ("pickle", "marshal", "shelve", "dill")]
    assert not wrong, wrong


def test_style_budget() -> None:
    lengths = sorted(_own_lines(function) for tree in sources().values() for function in _functions(tree))
    notes = {place: note for path, tree in sources().items() for place, note in _notes(path, tree)}
    p95 = lengths[int(len(lengths) * 0.95)]
    print(f"\n{len(lengths)} functions: median {lengths[len(lengths) // 2]}, 95 % {p95}, longest {lengths[-1]} lines")
    for place, note in notes.items():
        print(f"{place}: {note}: {EXPLAINED.get(place, 'not explained')}")
    assert p95 <= 40
    assert not sorted(notes.keys() - EXPLAINED.keys()), "past the budget: split it, or explain it in EXPLAINED"
    assert not sorted(EXPLAINED.keys() - notes.keys()), "within the budget again: remove it from EXPLAINED"


def _notes(path: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Where a file leaves the budget: (place, what)."""
    num_lines = (ROOT / path).read_text().count("\n")
    if num_lines > 400:
        yield path, f"{num_lines} lines (budget 400)"
    for found in imports(path, tree):
        if found.place == "block" and found.name.split(".")[0] in ("kvtier", *sys.stdlib_module_names):
            yield f"{path}:{found.name}", "imported inside a block"
    for function in _functions(tree):
        if _own_lines(function) > 70:
            yield f"{path}:{function.name}", f"{_own_lines(function)} lines (budget 70)"
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        num_parameters = sum(argument.arg not in ("self", "cls") for argument in arguments)
        if num_parameters > 6:
            yield f"{path}:{function.name}", f"{num_parameters} parameters (budget 6)"
        if any(isinstance(node, ast.ExceptHandler) and _swallows_all(node) for node in ast.walk(function)):
            yield f"{path}:{function.name}:except", "catches every exception"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            num_public = sum(isinstance(inner, Function) and not inner.name.startswith("_") for inner in node.body)
            if num_public > 15:
                yield f"{path}:{node.name}", f"{num_public} public methods (budget 15)"


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def _own_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = node.body[0]
    is_doc = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    doc_lines = (first.end_lineno or first.lineno) - first.lineno + 1 if is_doc else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - doc_lines


def _swallows_all(node: ast.ExceptHandler) -> bool:
    """A handler of everything that does not end in a bare `raise`."""
    is_broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
    return is_broad and not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None)

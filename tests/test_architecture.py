"""The borders of the design and the budget of the style guide: who imports whom, and how long things get.

A new folder is added to ROWS here, which is the moment to ask whether it stands in the right place.
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

# Bottom to top: a folder imports what stands in rows before its own. Tiers of a row never import each other; the
# hierarchy alone knows them all.
ROWS: Final = (
    ("tiers",),
    ("tiers/config",),
    ("tiers/compiled",),
    ("tiers/naming", "tiers/reuse"),
    ("tiers/pool",),
    ("tiers/host",),
    ("tiers/shared",),
    ("tiers/copies", "tiers/file", "tiers/peers", "tiers/redis", "tiers/objects"),
    ("tiers/hierarchy",),
    ("connector/daemon", "connector/models"),
    ("connector",),
    ("connector/segments",),
    ("connector/vllm", "connector/sglang", "connector/transformers"),
    ("engine",),
    ("engine/demo", "service"),
    ("service/web", "service/traces"),
    ("service/simulation",),
    ("service/events", "service/archive", "service/observe"),
    ("service/explain",),
    ("service/node", "service/cluster", "service/doctor", "service/openai"),
    ("service/bench",),
    ("service/admin", "service/router", "service/engine"),
    ("service/ray",),
    ("kvtier/cli",),
    ("kvtier",),
)
PACKAGE_MAY_IMPORT: Final = {
    "tiers": {"tiers"},
    "connector": {"tiers", "connector"},
    "engine": {"tiers", "connector", "engine"},
    "service": {"tiers", "connector", "service"},
    "kvtier": {"tiers", "connector", "engine", "service"},
}
SERVES_THE_ENGINE: Final = "service/engine/"  # the one folder of the service that may import the engine
TORCH_FOLDERS: Final = (
    "tiers/host",
    "tiers/copies",
    "connector/vllm",
    "connector/segments",
    "connector/transformers",
    "engine",
    "engine/demo",
)
TORCH_FILES: Final = (
    "connector/worker.py",
    "connector/models/computes.py",
    "connector/models/hf_model.py",
    "connector/models/model_watch.py",
    "connector/models/ordinary.py",
    "service/engine/server.py",
    "service/sizing.py",
)
# Who imports torch and transformers when they are imported: what the extras `engine` and `transformers` are for.
LOADS_TORCH: Final = (*TORCH_FOLDERS, "service/engine")
FOR_ENGINES: Final = {
    "KVTierConnector",
    "KVTierECConnector",
    "KVTierSecondaryTier",
    "KVTierStorage",
    "KVTier",
    "RayOptions",
    "build",
}  # users and engines name these
# Past the budget, with the reason. The keys are the places that `test_style_budget` prints.
EXPLAINED: Final = {
    "connector/models/hf_model.py:weights_of:except": "a quantiser's state_dict raises what it likes; one line",
    "connector/models/ordinary.py:__init__:except": "a model's class, anybody's, raises what it likes when made anew",
    "connector/vllm/blending.py:advance:except": "beside any step: a blend that fails is counted, its prompt computed",
    "connector/vllm/scheduler.py:__init__": "what vLLM's scheduler has, and each of it once",
    "tiers/tier.py:Tier": "a tier's verbs, and its capabilities: what it lacks it inherits",
    "tiers/file/store.py:open": "the tier's whole configuration; every caller names each",
    "tiers/file/store.py:FileStore": "a tier's verbs, and what it tells: children, lineage, ends, room",
    "service/archive/archive.py:export_blocks": "the namespace, and all that may be said of its export",
    "service/archive/archive.py:import_blocks": "the same of its import",
    "kvtier/cli/servers_cli.py:serve_engine": "one parameter for each option of the command line",
    "kvtier/cli/servers_cli.py:route": "the same",
    "kvtier/__init__.py:kvtier.tiers.extras": "`import kvtier` alone imports no other part of kvtier",
    "kvtier/cli/__init__.py:kvtier.cli.program": "Ctrl-C while it is imported ends without a traceback",
    "kvtier/cli/servers_cli.py:kvtier.service.admin.http_app": "starlette and uvicorn, which other verbs do not need",
    "kvtier/cli/servers_cli.py:kvtier.service.web.http_server": "the same",
    "kvtier/cli/servers_cli.py:kvtier.service.router.router": "the same",
    "kvtier/cli/servers_cli.py:kvtier.service.router.processes": "the same",
    "kvtier/cli/servers_cli.py:kvtier.service.events.publisher": "pyzmq, likewise",
    "kvtier/cli/servers_cli.py:kvtier.tiers.hierarchy.opening": "numpy and redis, which other verbs do not need",
    "kvtier/cli/servers_cli.py:kvtier.connector.models.checkpoint": "safetensors, which other verbs do not need",
    "kvtier/cli/demo_cli.py:kvtier.connector.models.checkpoint": "the same",
    "kvtier/cli/checks_cli.py:kvtier.tiers.hierarchy.opening": "numpy and redis, which other verbs do not need",
    "kvtier/cli/servers_cli.py:kvtier.service.node.daemon": "numpy and redis, which other verbs do not need",
    "service/events/publisher.py:_run:except": "top of the loop: a batch that fails is counted, the thread lives on",
    "service/events/consumer.py:_run:except": "top of the worker loop: what failed is counted and read anew",
    "kvtier/cli/admin_cli.py:kvtier.service.web.http_client": "httpx2, which help does not need",
    "kvtier/cli/admin_cli.py:kvtier.service.web.operator_token": "pydantic, likewise",
    "kvtier/cli/servers_cli.py:kvtier.service.engine.server": "torch and transformers take seconds to import",
    "engine/offload.py:start_copies:except": "beside any step: the worker reports them as failed, the rest goes on",
    "service/ray/request_router.py:choose_replicas:except": "Ray Serve would leave that request without a replica",
    "service/engine/loop.py:_admit:except": "the same: what fails while a request is taken in is that request's alone",
    "service/engine/loop.py:_reset:except": "a reset that fails is told to who asked for it; requests go on",
    "service/engine/loop.py:_step:except": "top of the worker loop: a failed step is counted, its requests are told",
    "kvtier/cli/demo_cli.py:kvtier.engine.demo.story": "torch and transformers take seconds to import",
    "kvtier/cli/demo_cli.py:kvtier.engine.demo.rag": "the same",
    "kvtier/cli/demo_cli.py:kvtier.engine.demo.generation": "the same",
    "kvtier/cli/measure_cli.py:size": "one parameter for each option of the command line",
    "kvtier/cli/measure_cli.py:kvtier.service.sizing": "torch and transformers take seconds to import",
    "kvtier/cli/measure_cli.py:run_worth": "one parameter for each option of the command line",
    "kvtier/cli/measure_cli.py:kvtier.engine.prefill_time": "torch and transformers take seconds to import",
    "kvtier/cli/measure_cli.py:kvtier.service.breakeven": "numpy, which other verbs do not need",
    "kvtier/cli/measure_cli.py:run_bench": "one parameter for each option of the command line",
    "kvtier/cli/measure_cli.py:kvtier.service.bench.bench": "httpx2, which help does not need",
    "service/web/http_server.py:__init__": "a server's bounds, each said by who serves",
    "kvtier/cli/admin_cli.py:kvtier.connector.models.answers": "tokenizers is asked for with --text alone",
    "tiers/hierarchy/lower_tier.py:TierPort": "all that the hierarchy does with one tier below",
    "tiers/metrics.py:Metrics": "one verb for each thing that is counted",
    "kvtier/cli/demo_cli.py:run_generate": "one parameter for each option of the command line",
    "kvtier/cli/measure_cli.py:simulate": "one parameter for each option of the command line",
    "connector/daemon/client.py:RemoteTiers": "implements the same three, on one socket",
    "tiers/compiled/extensions.py:_loaded:except": "an extension's start may raise anything: then Python does its work",
    "tiers/file/extents.py:ExtentMap": "an extent's whole life, to the end of its slab's tail, over one index",
    "tiers/copies/device.py:BlockPool": "L1's verbs under one lock; four of them are a ChangeFeed's",
    "tiers/hierarchy/hierarchy.py:Hierarchy": "implements the three protocols of `cache_tiers`",
    "tiers/shared/stream.py:__init__": "rows, where they stand, and how they are digested: as the extension module's",
    "tiers/copies/transfer.py:_copy_blocks": "as the extension module's, whose twin it is",
    "tiers/pool/pool.py:SlotPool": "one lock, one law: the verbs of a slot's life belong together",
    "tiers/pool/core.py": "one extension module: its classes call one another in C",
    "service/events/holders.py": "the same",
    "tiers/pool/core.py:SlotCore": "all that happens to a slot, over one set of arrays; pools are verbs over it",
    "tiers/tracing.py:start:except": "OpenTelemetry and its variables raise what they like: then there are no spans",
    "tiers/hierarchy/io_queue.py:begun:except": "what work raises is for whoever has its future",
    "tiers/hierarchy/io_queue.py:run:except": "the same",
    "tiers/hierarchy/io_queue.py:_work:except": "top of the worker loop: a failed end is logged, the thread lives on",
    "tiers/hierarchy/io_queue.py:_result:except": "a job that raises is counted, the thread lives on",
    "service/router/fleet.py:look:except": "whatever a replica says, it is looked at again",
    "service/node/loop.py:_settle:except": "what a call ended with is its caller's, who waits for it on another thread",
    "service/node/daemon.py:_ready:except": "one client's words must not end the service: it is cut off, counted",
    "connector/scheduler.py:SchedulerSide": "all that an engine's scheduler asks and tells, request by request",
    "connector/vllm/connector.py:KVTierConnector": "vLLM's interface, whose methods these are; each is a line or two",
    "connector/models/answers.py:load_tokenizer:except": "tokenizers raises no narrower type for a file that is none",
    "connector/transformers/config_form.py:form_of_config:except": "transformers and its hub raise what they like",
    "tiers/copies/copy_probe.py:_run:except": "top of a thread: drivers and compilers raise what they like",
    "tiers/objects/bucket.py:_request:except": "the client's panics are no Exception; what is not expected goes on",
    "tiers/copies/transfer.py:_enqueue:except": "a caller gets no exception",
    "tiers/copies/transfer.py:_run:except": "a failed copy is reported: no thread ends, no caller gets it",
    "tiers/hierarchy/lower_tier.py:_keep_probing:except": "a thread that ended would leave the tier off for good",
    "tiers/hierarchy/stores.py:seal_each:except": "as a job that raises: it is counted, its slots are given back",
    "tiers/peers/store.py:_tend:except": "a thread that ended would keep peers away for good; counted",
}

Function: Final = ast.FunctionDef | ast.AsyncFunctionDef


class Import(NamedTuple):
    """One import: what is imported (dotted), where, and whether at the top of the file."""

    name: str
    path: str
    line: int
    place: str  # "top", "typing", "block", "late"
    written: str  # as it stands there: the dotted name, behind a colon what is taken from it


@cache
def sources() -> dict[str, ast.Module]:
    """Path (relative, posix) to syntax tree of every file of ours in the packages and of kvtier/ itself."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    paths += [*(ROOT / "kvtier").glob("*.py"), *(ROOT / "kvtier" / "cli").glob("*.py")]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(paths)}


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All of them."""
    return list(ast.walk(tree))


@cache
def face(folder: str) -> dict[str, str]:
    """What a folder lets others import: name to the module it is defined in, all dotted; a module stands for itself."""
    init = ROOT / folder / "__init__.py"
    stub = init.with_suffix(".pyi")  # of a lazy face: where torch or an engine would come along
    package = "kvtier" if folder == "kvtier" else f"kvtier.{folder.removeprefix('kvtier/').replace('/', '.')}"
    names = {}
    for node in ast.parse((stub if stub.exists() else init).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            module = (f"{package}." if node.level else "") + (node.module or "")
            for alias in node.names if module.startswith(package) else ():
                names[alias.name] = f"{package}.{alias.name}" if module.rstrip(".") == package else module
    return names


def imports(path: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of a file, wherever it stands; what comes through a face counts as the module behind it."""
    places = {id(node): "top" for node in tree.body}
    for block in tree.body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            places |= {id(node): "typing" for node in block.body}
    for node in nodes(tree):
        place = places.get(id(node), "block")
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, path, node.lineno, place, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} relative import"
            written = str(node.module)
            for alias in node.names:
                behind = face(folder_of(written) or "").get(alias.name, written) if is_folder(written) else written
                yield Import(behind, path, node.lineno, place, f"{written}:{alias.name}")
                if is_folder(f"{written}.{alias.name}"):
                    yield from _taken(path, tree, f"{written}.{alias.name}", alias.asname or alias.name)


def _taken(path: str, tree: ast.Module, folder: str, name: str) -> Iterator[Import]:
    """What a file takes from a folder's face when it is used: `name.attribute`, which is a late import."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
            behind = face(folder_of(folder) or "").get(node.attr, folder)
            yield Import(behind, path, node.lineno, "late", f"{folder}:{node.attr}")


@cache
def all_imports() -> list[Import]:
    return [found for path, tree in sources().items() for found in imports(path, tree)]


@cache
def is_folder(name: str) -> bool:
    """Whether a dotted name is a folder of ours, not a file."""
    path = name.removeprefix("kvtier.").replace(".", "/")
    return name == "kvtier" or f"{path}/__init__.py" in sources() or f"kvtier/{path}/__init__.py" in sources()


@cache
def folder_of(name: str) -> str | None:
    """The folder of ours that a dotted name is, or is in; else None."""
    if name.partition(".")[0] != "kvtier":
        return None
    while not is_folder(name):
        name = name.rpartition(".")[0]
    path = name.removeprefix("kvtier").lstrip(".").replace(".", "/")
    return path if f"{path}/__init__.py" in sources() else f"kvtier/{path}".rstrip("/")


def home_of(path: str) -> str:
    """The folder a file stands in."""
    return path.rpartition("/")[0]


def test_every_folder_has_its_row() -> None:
    folders = {home_of(path) for path in sources()}
    rows = list(chain.from_iterable(ROWS))
    assert len(rows) == len(set(rows))
    assert not folders ^ set(rows), "add it to ROWS in this file, and ask whether it stands in the right place"


def test_folders_import_downwards_only() -> None:
    height = {folder: height for height, row in enumerate(ROWS) for folder in row}
    wrong = []
    for found in all_imports():
        home, target = home_of(found.path), folder_of(found.name)
        if target is None or target == home or found.place == "typing" or target == "kvtier":
            continue
        package = target.split("/")[0]
        may_import = PACKAGE_MAY_IMPORT[home.split("/")[0]] | (
            {"engine"} if found.path.startswith(SERVES_THE_ENGINE) else set()
        )
        if height[target] >= height[home] or package not in may_import:
            wrong.append(
                f"{found.path}:{found.line} imports {found.name}: {target} does not stand below {home}; move what both "
                "need into a folder below, or hand it in"
            )
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_past_a_face() -> None:
    wrong = []
    for found in chain(all_imports(), benchmark_imports()):
        written, _, name = found.written.partition(":")
        target = folder_of(written)
        if target is None or target == home_of(found.path):
            continue
        if not is_folder(written):
            wrong.append(f"{found.path}:{found.line} imports {written} past the face of {target}")
        elif name not in face(target) and not is_folder(f"{written}.{name}") and name != "__version__":
            wrong.append(f"{found.path}:{found.line}: {name} is not in the face of {target}")
    assert not wrong, "\n".join(
        [*wrong, "import it from the folder; if others should know it, import it in its __init__"]
    )


def test_faces_hold_what_others_use() -> None:
    """Each name leads somewhere, and somebody outside asks for it: what nobody asks for is a folder's own affair."""
    used = {tuple(found.written.split(":")) for found in chain(all_imports(), benchmark_imports())}
    offered = set(face("kvtier")) | FOR_ENGINES
    idle = []
    for folder in chain.from_iterable(ROWS[:-1]):
        package = "kvtier." + folder.removeprefix("kvtier/").replace("/", ".")
        for name, module in face(folder).items():
            assert module.removeprefix("kvtier.").replace(".", "/") + ".py" in sources(), f"{folder}: {name}"
            if (package, name) not in used and name not in offered:
                idle.append(f"{folder}: nobody outside imports {name}; take it out of its __init__")
    assert not idle, "\n".join(idle)


@cache
def benchmark_imports() -> list[Import]:
    paths = sorted((ROOT / "benchmarks").glob("*.py"))
    return [found for path in paths for found in imports(f"benchmarks/{path.name}", ast.parse(path.read_text()))]


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for found in all_imports():
        if found.path.endswith("/__init__.py"):
            continue  # a face: what comes through it counts as the module behind it
        module = found.path.removesuffix(".py").replace("/", ".")
        target = found.name.removeprefix("kvtier.")
        if found.name.startswith("kvtier.") and target != module:
            graph.setdefault(module, set()).add(target)
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
        and home_of(found.path) not in TORCH_FOLDERS
        and found.path not in TORCH_FILES
        and found.place != "typing"
    ]
    assert not wrong, "\n".join(wrong)


def test_what_needs_no_model_loads_no_torch() -> None:
    """A daemon, a router and the verbs of operators run where no torch is, and start without its seconds elsewhere."""
    loads: dict[str, set[str]] = {}
    for found in all_imports():
        if found.place == "top":
            module = found.name.removeprefix("kvtier.").replace(".", "/")
            loads.setdefault(found.path, set()).add(f"{module}.py" if f"{module}.py" in sources() else module)
    with_torch = {"torch", "cupy", "transformers"}
    while more := {path for path, modules in loads.items() if modules & with_torch} - with_torch:
        with_torch |= more
    files = with_torch & sources().keys()
    assert "engine/model.py" in files
    wrong = sorted(path for path in files if home_of(path) not in LOADS_TORCH and path not in TORCH_FILES)
    assert not wrong, f"{wrong}: import it where it is used, through its folder's face (`copies.CudaCopyStream`)"


def test_nothing_imports_a_second_copy() -> None:
    programs = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in programs}
    may = re.compile(rf"^.*\b(?:import|from)\b.*(?<![\w.])(?:{'|'.join(PACKAGES)})\b", re.MULTILINE)  # what to parse
    theirs = (found for path, text in texts.items() if may.search(text) for found in imports(path, ast.parse(text)))
    wrong = [
        f"{found.path}:{found.line} import {found.name}: write kvtier.{found.name}"
        for found in (*all_imports(), *theirs)
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
    hiding = sorted(path.relative_to(ROOT).as_posix() for path in named if path.stem in libraries)
    assert not hiding, f"{hiding}: a file run from its folder would hide the library of that name"


def test_environment_is_read_in_config_alone() -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in sources().items()
        for node in nodes(tree)
        if path not in ("tiers/config/config.py", "tiers/config/environment.py")
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
    if num_lines > 800:
        yield path, f"{num_lines} lines (budget 800)"
    swallowing = [each.lineno for each in nodes(tree) if isinstance(each, ast.ExceptHandler) and _swallows_all(each)]
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
        if any(function.lineno < line <= (function.end_lineno or 0) for line in swallowing):
            yield f"{path}:{function.name}:except", "catches every exception"
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef):
            num_public = sum(isinstance(inner, Function) and not inner.name.startswith("_") for inner in node.body)
            if num_public > 15:
                yield f"{path}:{node.name}", f"{num_public} public methods (budget 15)"


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes(tree) if isinstance(node, Function)]


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

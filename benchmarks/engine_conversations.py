"""Many conversations with a real vLLM on this CPU whose own cache holds only a few of them, side by side over six ways.

none · native: vLLM's offloading to host memory · native files: its tiering, over files · lmcache: LMCache's server over
host memory and files · kvtier · kvtier below native: kvtier's file tier in the place of vLLM's. Every way answers the
same prompts, written once by the engine itself: each turn's prompt is all that was said and a question, and between two
turns of one conversation all others have theirs. Four clients ask at a time. Host memory holds everything. Then all
processes end, new ones find what the storage kept, and the same is asked again ("restart"). One engine runs at a time;
within a repetition the ways come in a random order. A token's time is when the engine's step hands it out. CPU is of
all processes, from the first prompt until the engine is shut down. "Over" is the ratio of kvtier's figure to another's
in one repetition, turned so that below 1 is better; intervals are 95 %, from a bootstrap over repetitions. A way whose
engine ends has a row with the reason, and is tried once more. `--save` writes a plot too.
"""

import hashlib
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from _report import RESULTS, ROOT, Given, Result, Row, Target, interval, option, program, progress, report
from _rig import VLLM, EngineEnded, EngineProcess, installed, random_tokens, scratch
from engine_ttft import make_model
from matplotlib.figure import Figure

from kvtier.tiers import KVTierError

ARMS: Final = ("none", "native", "native files", "lmcache", "kvtier", "kvtier below native")
OURS: Final = {"kvtier": ("none", "native", "native files", "lmcache"), "kvtier below native": ("native files",)}
PHASES: Final = ("first run", "restart")
TIMES: Final = ("TTFT p50 ms", "TTFT p99 ms", "inter-token p50 ms", "inter-token p99 ms")
COLUMNS: Final = ("hit share", *TIMES, "tokens/s", "CPU s")
MORE_IS_BETTER: Final = ("hit share", "tokens/s")
CLIENTS: Final = 4
BLOCK: Final = 32  # tokens
ENGINE: Final = {"host_bytes": 1 << 30, "max_len": 2048, "step_tokens": 512}  # see _vllm_arm.py
MODEL: Final = {"size": 512, "layers": 8}  # 35 M parameters in fp32, KV blocks of 256 KiB
REPETITIONS: Final = 5  # of everything
TRIES: Final = 2  # of a way: so often its engine may end before it is left out

RunFigures = dict[str, float]
TokenLists = list[list[int]]
Measured = dict[int, RunFigures]  # by repetition
Found = dict[str, dict[str, Measured]]


@dataclass(frozen=True, slots=True)
class Sizes:
    conversations: int
    turns: int
    opening: int  # tokens of the first question
    question: int  # of every other one
    answer: int

    @property
    def num_blocks(self) -> int:
        """Blocks of vLLM's cache: what the clients' longest requests take, and half as many more."""
        longest = self.opening + self.turns * (self.question + self.answer)
        return -(-3 * CLIENTS * longest // (2 * BLOCK))


FULL: Final = Sizes(20, 3, 512, 128, 16)
QUICK: Final = Sizes(8, 2, 256, 64, 8)


class Runs:
    """Starts engines of one program run, each with an empty folder of its own or with one that has been used."""

    def __init__(self, home: Path, lmcache: Path | None) -> None:
        self.home, self.log = home, home / "engine.log"
        self.packages = {} if lmcache is None else {"lmcache": [str(lmcache)]}

    def start(self, arm: str, num_blocks: int) -> EngineProcess:
        self.folder(arm).mkdir(exist_ok=True)
        setup: Row = {"model": str(self.home / "model"), "arm": arm, "folder": str(self.folder(arm)), **ENGINE}
        setup |= {"num_blocks": num_blocks, "packages": self.packages.get(arm, [])}
        with self.log.open("wb") as log:
            return EngineProcess(VLLM, "_vllm_arm.py", setup, log)

    def folder(self, arm: str) -> Path:
        return self.home / arm.replace(" ", "-")

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:200] if lines else "it said nothing"


def lmcache_packages() -> tuple[Path | None, str]:
    """LMCache's folder; or None, and why it could not be had."""
    wanted = ROOT / "benchmarks" / "requirements-lmcache.txt"
    name = f"lmcache-{hashlib.sha256(wanted.read_bytes()).hexdigest()[:16]}"
    try:
        return installed(name, "-r", str(wanted), python=VLLM), ""
    except subprocess.CalledProcessError as error:
        return None, (error.stderr.strip().splitlines() or ["pip failed"])[-1][:200]


def write_conversations(runs: Runs, sizes: Sizes) -> tuple[TokenLists, TokenLists]:
    """Every turn's prompt in the order of asking, and its answer; both are the engine's own words."""
    progress(f"writing {sizes.conversations} conversations of {sizes.turns} turns")
    rng = np.random.default_rng(1)
    said: TokenLists = [[] for _ in range(sizes.conversations)]
    prompts, answers = TokenLists(), TokenLists()
    engine = runs.start("none", sizes.num_blocks * sizes.conversations)
    for turn in range(sizes.turns):
        order = rng.permutation(sizes.conversations).tolist()
        asked = [said[one] + random_tokens(rng, sizes.question if turn else sizes.opening) for one in order]
        told = engine.ask("converse", prompts=asked, num_tokens=sizes.answer, clients=CLIENTS)["texts"]
        for one, prompt, answer in zip(order, asked, told, strict=True):
            said[one] = prompt + answer
        prompts += asked
        answers += told
    engine.close()
    return prompts, answers


def measure(runs: Runs, arm: str, phase: str, prompts: TokenLists, answers: TokenLists, sizes: Sizes) -> RunFigures:
    """Start the engine, have it answer all, and end it. Raises EngineEnded."""
    engine = runs.start(arm, sizes.num_blocks)
    try:
        strangers = np.random.default_rng(100 + PHASES.index(phase))
        engine.ask("warm", prompts=[random_tokens(strangers, 200) for _ in range(2)])
        told = engine.ask("converse", prompts=prompts, num_tokens=sizes.answer, clients=CLIENTS)
        cpu = engine.ask("close")
    finally:
        engine.close()
    times = {"TTFT": 1e3 * np.array(told["ttft"]), "inter-token": 1e3 * np.concatenate(told["itl"])}
    return {
        "hit share": sum(told["cached"]) / sum(map(len, prompts)),
        **{f"{name} p{q} ms": float(np.percentile(ms, q)) for name, ms in times.items() for q in (50, 99)},
        "tokens/s": len(prompts) * sizes.answer / told["seconds"],
        "CPU s": cpu,
        "other texts": sum(ours != theirs for ours, theirs in zip(told["texts"], answers, strict=True)),
    }


def ratio(column: str, ours: RunFigures, theirs: RunFigures) -> float:
    over, under = (theirs, ours) if column in MORE_IS_BETTER else (ours, theirs)
    return max(over[column], 1e-9) / max(under[column], 1e-9)


def rows_of(found: Found, missing: dict[str, list[str]]) -> list[Row]:
    """Each way's medians; kvtier over the others; what could not be run, and why."""
    rows: list[Row] = [
        {"phase": phase, "way": arm}
        | {name: float(np.median([one[name] for one in measured.values()])) for name in (*COLUMNS, "other texts")}
        for phase in PHASES
        for arm, measured in found[phase].items()
    ]
    for phase, arm, rivals in _races(found):
        for other in rivals:
            spans = {column: _interval(found[phase], arm, other, column) for column in COLUMNS}
            told = {column: f"{mean:.2f} ({low:.2f} to {high:.2f})" for column, (mean, low, high) in spans.items()}
            rows.append({"phase": phase, "way": arm, "over": other, **told})
    return rows + [{"way": arm, "not run": reason} for arm, reasons in missing.items() for reason in reasons]


def _races(found: Found) -> Iterator[tuple[str, str, list[str]]]:
    """Of each phase our ways, and those of the others that answered in a repetition in which ours did."""
    for phase in PHASES:
        for arm, others in OURS.items():
            ours = found[phase].get(arm, {}).keys()
            if rivals := [other for other in others if not ours.isdisjoint(found[phase].get(other, {}))]:
                yield phase, arm, rivals


def _interval(measured: dict[str, Measured], ours: str, theirs: str, column: str) -> tuple[float, float, float]:
    common = measured[ours].keys() & measured[theirs].keys()
    return interval([ratio(column, measured[ours][one], measured[theirs][one]) for one in sorted(common)])


def targets_of(found: Found) -> list[Target]:
    """In every column kvtier is level with the best of the others, or ahead; so is its file tier with vLLM's."""
    targets = []
    for phase, arm, rivals in _races(found):
        for column in COLUMNS:
            intervals = {other: _interval(found[phase], arm, other, column) for other in rivals}
            best = max(rivals, key=lambda other: intervals[other][0])
            mean, low, _ = intervals[best]
            name = f"{phase}, {column}: {arm} over {best}"
            targets += [Target(f"{name}, lower end of 95 %", 1, low), Target(f"{name}, mean", 1, mean)]
    return targets


def plot(found: Found, path: Path) -> None:
    """A panel for each column and phase: medians, with the range over repetitions."""
    figure = Figure((16, 4.6), layout="constrained")
    panels = figure.subplots(len(PHASES), len(COLUMNS), sharey=True)
    for phase, line in zip(PHASES, panels, strict=True):
        for column, axes in zip(COLUMNS, line, strict=True):
            arms = list(found[phase])
            values = [np.array([one[column] for one in found[phase][arm].values()]) for arm in arms]
            middles = np.array([np.median(each) for each in values])
            reach = [middles - [each.min() for each in values], [each.max() for each in values] - middles]
            colours = ["tab:orange" if arm in OURS else "tab:blue" for arm in arms]
            axes.barh(arms, middles, xerr=reach, color=colours, error_kw={"linewidth": 0.8})
            axes.set_title(f"{phase}: {column}", fontsize=8)
            axes.tick_params(labelsize=8)
    panels[0][0].invert_yaxis()
    figure.suptitle("vLLM on a CPU: conversations that its own cache cannot hold", fontsize=10)
    figure.savefig(path, dpi=150)


def run(args: Given, runs: Runs, missing: dict[str, list[str]]) -> Found:
    """All repetitions. What a way could not do is in `missing` with its engine's last words; the others go on."""
    sizes = QUICK if args.quick else FULL
    make_model(runs.home / "model", small=args.quick, **MODEL)
    prompts, answers = write_conversations(runs, sizes)
    rng, began = np.random.default_rng(2), time.monotonic()
    found: Found = {phase: defaultdict(dict) for phase in PHASES}
    tries = {arm: 0 if arm in missing else TRIES for arm in args.ways}
    for repetition in range(repetitions := 1 if args.quick else REPETITIONS):
        for arm in rng.permutation([arm for arm in args.ways if tries[arm]]).tolist():
            for phase in PHASES:
                minutes = (time.monotonic() - began) / 60
                progress(f"{minutes:.1f} min: repetition {repetition + 1}/{repetitions}, {arm}, {phase}")
                try:
                    found[phase][arm][repetition] = measure(runs, arm, phase, prompts, answers, sizes)
                except EngineEnded as ended:
                    tries[arm] -= 1
                    reason = f"repetition {repetition + 1}, {phase}: {ended}: {runs.last_words()}"
                    progress(f"{arm}: {reason}")
                    missing.setdefault(arm, []).append(reason)
                    break
            shutil.rmtree(runs.folder(arm), ignore_errors=True)
    return {phase: {arm: found[phase][arm] for arm in args.ways if arm in found[phase]} for phase in PHASES}


@program(option("--ways", nargs="+", default=ARMS, choices=ARMS))
def main(args: Given) -> Result:
    if not VLLM.exists():
        raise KVTierError("vLLM is not installed beside kvtier: run `.ci/beside-engine vllm`")
    missing: dict[str, list[str]] = {}
    lmcache, reason = lmcache_packages() if "lmcache" in args.ways else (None, "")
    if reason:
        missing["lmcache"] = [f"it could not be installed: {reason}"]
    with scratch("conversations") as home:
        found = run(args, Runs(Path(home), lmcache), missing)
    if args.save:
        plot(found, RESULTS / "engine_conversations.png")
    setup = asdict(QUICK if args.quick else FULL) | {"clients": CLIENTS, "repetitions": REPETITIONS}
    status = report(args, rows_of(found, missing), targets_of(found), setup)
    return 1 if set(OURS).intersection(missing) else status

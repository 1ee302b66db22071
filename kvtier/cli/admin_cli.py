"""`kvtier status`, `top`, `explain`, `pin`, `unpin`, `quota`, `purge`, `export`, `import`, `trace`: for operators."""

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvtier.cli.options import ConfigOption, JsonOption, begin, given, parsed, progress_bar, show
from kvtier.service import Exit, Json, harmless, observe
from kvtier.service import explain as explanations
from kvtier.tiers import ConfigError, FormatError, KVTierError
from kvtier.tiers import config as configuration
from kvtier.tiers.config import format_size, parse_duration, parse_size, parse_time, show_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvtier.service.web import HttpClient


app = typer.Typer()

_STATUS_FIELDS: Final = ("clients", "replicas", "steps")  # of a daemon's status, a router's, an engine's
_SIZES: Final = ("bytes", "size", "used", "slab", "slab_used")  # columns of tables

ModelOption = Annotated[
    str | None, typer.Option(metavar="FINGERPRINT", help="The first digits of its fingerprint, if several are open.")
]
UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="An engine or a router to ask, instead of the daemon.")
]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that an operator names, of one tenant and model: the options of a command that takes one."""

    blocks: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON list of a prompt's token ids, or of block names; - is stdin."),
    ] = None
    text: Annotated[str | None, typer.Option(metavar="FILE", help="The prompt's text instead; - is stdin.")] = None
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model's folder, which cuts --text into tokens.")
    ] = None
    cache_salt: Annotated[str | None, typer.Option(metavar="SALT", help="The tenant whose prompt it is.")] = None
    model: ModelOption = None

    def is_given(self) -> bool:
        """ConfigError if one of its options is given without it."""
        if self.blocks is not None or self.text is not None:
            return True
        for name, value in (("--tokenizer", self.tokenizer), ("--cache-salt", self.cache_salt)):
            if value is not None:
                raise ConfigError(f'{name} "{value}": it belongs to a prompt; give one by --blocks or --text')
        return False

    def selection(self) -> Json:
        """The daemon's selection: a prompt's blocks by names or by tokens, with model and tenant."""
        body = given(model=self.model, cache_salt=self.cache_salt)
        if self.blocks is not None and self.text is not None:
            raise ConfigError(f'--text "{self.text}": --blocks names the prompt, too; give one of them')
        if self.text is None and self.tokenizer is not None:
            why = "it cuts --text, which is not given; give that, or leave it out"
            raise ConfigError(f'--tokenizer "{self.tokenizer}": {why}')
        if self.blocks is not None:
            values = read_list(self.blocks)
            body["hashes" if values and isinstance(values[0], str) else "tokens"] = values
        if self.text is not None:
            body["tokens"] = list(self.require(self.cutter()).encode(read(self.text, "--text")).ids)
        return body

    def cutter(self) -> "Tokenizer | None":
        if self.tokenizer is None:
            return None
        from kvtier.connector.models import load_tokenizer

        return load_tokenizer(self.tokenizer, "--tokenizer")

    def require(self, cutter: "Tokenizer | None") -> "Tokenizer":
        if cutter is None:
            raise ConfigError(f'--text "{self.text}": it takes the model\'s tokenizer; name its folder by --tokenizer')
        return cutter


@dataclass(frozen=True, slots=True)
class CommandContext:
    """What every command here gets: the daemon, and how to print."""

    client: "HttpClient"
    as_json: bool
    elsewhere: "Callable[[str], HttpClient]"  # by URL, with the same token

    def show(self, answer: Json, line: str) -> None:
        print(json.dumps(answer) if self.as_json else harmless(line))


def command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function of a `CommandContext`, maybe a `Prompt`, and options a command with the daemon's options."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        def run(**options: Any) -> None:
            with _connected(**{name: options.pop(name) for name in common}) as context:
                if prompt:
                    options["prompt"] = Prompt(**{name: options.pop(name) for name in prompt})
                function(context, **options)

        common = inspect.signature(_connected).parameters
        _, *own = inspect.signature(function).parameters.values()
        prompt = inspect.signature(Prompt).parameters if own and own[0].annotation is Prompt else {}
        declared = [*prompt.values(), *own[bool(prompt) :], *common.values()]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in declared]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        app.command(name)(run)
        return function

    return register


@contextmanager
def _connected(
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the daemon's pages are; instead of the configured address."),
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="What admin requests carry; instead of the configured token.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    socket: Annotated[str | None, typer.Option(metavar="PATH", hidden=True)] = None,
) -> Iterator[CommandContext]:
    """The daemon that the options name. Every command has these options."""
    from pydantic import SecretStr

    from kvtier.service.web import HttpClient, token_at

    if socket is not None:
        raise ConfigError(f'--socket "{socket}": only engines use it; give --http HOST:PORT, where the pages are')
    settings = configuration.Config.load(config).service
    if http is not None:
        host, _, port = http.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f'--http "{http}": not HOST:PORT; write it as in 127.0.0.1:9400')
    secret = settings.token if token is None else SecretStr(token)
    if secret is not None and not configuration.is_one_line(secret):
        raise ConfigError("--token (not shown): empty, or with white space around it; write the token alone")
    with ExitStack() as opened:

        def client(url: str | None = None) -> HttpClient:
            return opened.enter_context(closing(HttpClient(http or settings.http, secret, url, token_at)))

        yield CommandContext(client(), as_json, client)


@command("status")
def show_status(context: CommandContext, url: UrlOption = None) -> None:
    page = _server_of(context, url).status(*_STATUS_FIELDS)
    if "replicas" in page:
        cluster = observe.RouterStatus.parse(page)
        lines, is_well = observe.router_lines(cluster), cluster.num_up == len(cluster.replicas)
    elif "steps" in page:
        engine = observe.EngineStatus.parse(page)
        lines, is_well = observe.engine_lines(engine), engine.status == "ok"
    else:
        daemon = observe.DaemonStatus.parse(page)
        lines, is_well = observe.daemon_lines(daemon), daemon.status == "ok"
    context.show(page, "\n".join(lines))
    if not is_well:
        raise typer.Exit(Exit.DEGRADED)


@command("top")
def show_top(
    context: CommandContext,
    interval: Annotated[str, typer.Option(metavar="TIME", help='Time between two looks, as in "2s".')] = "1s",
    count: Annotated[int, typer.Option(metavar="NUMBER", min=0, help="Looks to take; 0 goes on until Ctrl-C.")] = 0,
    url: UrlOption = None,
) -> None:
    seconds = parsed("--interval", interval, parse_time)
    client = _server_of(context, url)
    observe.watch(lambda: client.status(*_STATUS_FIELDS), seconds, count, as_json=context.as_json)


@command("explain")
def explain(
    context: CommandContext,
    prompt: Prompt,
    request: Annotated[
        str | None, typer.Option("--request", metavar="ID", help="A request that ended lately, by its id.")
    ] = None,
    url: UrlOption = None,
) -> None:
    blocks, text = prompt.blocks, prompt.text
    if sum(each is not None for each in (blocks, text, request)) != 1:
        raise ConfigError("explain: give the prompt by one of --blocks FILE, --text FILE and --request ID")
    cutter = prompt.cutter()
    if text is not None and url is None:
        prompt.require(cutter)
    words = None if text is None else read(text, "--text")
    cut = None if cutter is None or words is None else list(cutter.encode(words).ids)
    if url is not None:
        asked = words if blocks is None else read_list(blocks)
        if blocks is not None and not all(isinstance(token, int) for token in asked or ()):
            raise ConfigError(f'--blocks "{blocks}": not token ids, which is what --url takes; write a list of numbers')
        named = given(cache_salt=prompt.cache_salt, model=prompt.model)
        body = given(prompt=asked, request=request, tokens=cut) | named
        answer = _server_of(context, url).post("/explain", body, "lines")
        context.show(answer, _joined(answer["lines"]))
        return
    selection = replace(prompt, text=None, tokenizer=None).selection() | given(tokens=cut, request=request)
    answer = context.client.post("/admin/explain", selection, "runs", "cause")
    decode = None if cutter is None else partial(cutter.decode, skip_special_tokens=False)
    special = () if cutter is None else [at for at, each in cutter.get_added_tokens_decoder().items() if each.special]
    context.show(answer, _joined(explanations.explained(answer, decode, selection.get("tokens", ()), special)))


def _joined(lines: Iterable[str]) -> str:
    """The lines made from a server's answer. FormatError if it has other fields."""
    try:
        return "\n".join(lines)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"answer of another kvtier ({error!r}); run one kvtier on both sides") from None


@command("pin")
def pin(
    context: CommandContext,
    prompt: Prompt,
    ttl: Annotated[str, typer.Option(metavar="TIME", help='How long they stay, as in "1h".')] = "1h",
) -> None:
    if not prompt.is_given():
        pins = context.client.get("/admin/pins", "pins")
        _show_table(context, pins, pins["pins"], ("pin", "model", "blocks", "bytes", "seconds_left"))
        return
    body = prompt.selection() | {"ttl": parsed("--ttl", ttl, parse_duration)}
    answer = context.client.post("/admin/pin", body, "pin", "blocks", "seconds_left")
    context.show(answer, f"pin {answer['pin']}: {answer['blocks']} blocks stay for {answer['seconds_left']:g} s")


@command("unpin")
def unpin(context: CommandContext, number: Annotated[int, typer.Argument(metavar="PIN", min=1)]) -> None:
    context.show(context.client.post("/admin/unpin", {"pin": number}), f"pin {number} is removed")


@command("quota")
def quota(
    context: CommandContext,
    cache_salt: Annotated[str | None, typer.Argument(metavar="SALT", help="The tenant.")] = None,
    size: Annotated[str | None, typer.Argument(metavar="SIZE", help='What it may have, as in "4GiB".')] = None,
    slab: Annotated[str | None, typer.Option(metavar="SIZE", help="What it may have of each model's slab.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take its quota away.")] = False,
) -> None:
    if cache_salt is None:
        quotas = context.client.get("/admin/quotas", "quotas")
        totals = ("used", "slab_used")
        rows = [{**each, **{name: sum(each[name].values()) for name in totals}} for each in quotas["quotas"]]
        _show_table(context, quotas, rows, ("cache_salt", "size", "used", "slab", "slab_used"))
        return
    if (size is slab is None) != remove:
        raise ConfigError(f'quota "{cache_salt}": give a size, as in 4GiB, or --remove')
    body: Json = {"cache_salt": cache_salt}
    what = "has no quota now"
    for name, option, text in (("size", "SIZE", size), ("slab", "--slab", slab)):
        if text is not None:
            body[name] = parsed(option, text, parse_size)
    if not remove:
        places = (("size", "host memory"), ("slab", "slab"))
        parts = [f"{format_size(body[name])} of each model's {place}" for name, place in places if name in body]
        what = f"may have {' and '.join(parts)}"
    context.show(context.client.post("/admin/quota", body), f"{cache_salt} {what}")


@command("purge")
def purge(
    context: CommandContext,
    prompt: Prompt,
    everything: Annotated[bool, typer.Option("--all", help="All blocks of all models.")] = False,
) -> None:
    if everything and not (prompt.blocks is prompt.text is prompt.model is None):
        raise ConfigError("purge --all: it removes every block; leave it out, or --blocks, --text and --model")
    if prompt.is_given():
        answer = context.client.post("/admin/evict", prompt.selection(), "evicted", "unpinned")
        evicted = ", ".join(f"{count} from {tier}" for tier, count in answer["evicted"].items())
        context.show(answer, f"evicted {evicted}; {answer['unpinned']} pins removed")
        return
    if everything == (prompt.model is not None):
        raise ConfigError(
            "purge: select what is to be removed, by --blocks FILE, --text FILE, --model FINGERPRINT or --all"
        )
    answer = context.client.post("/admin/reset", {"all": True} if everything else {"model": prompt.model}, "reset")
    context.show(answer, f"forgot everything of {', '.join(answer['reset']) or 'no model: none is open'}")


@command("export")
def export_file(
    context: CommandContext,
    prompt: Prompt,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Below the daemon's [service] archives.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    _transfer(context, "/admin/export", prompt.selection() | {"file": str(file), "force": force}, "exported")


@command("import")
def import_file(
    context: CommandContext,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Below the daemon's [service] archives.")],
    model: ModelOption = None,
    unsealed: Annotated[
        bool, typer.Option("--unsealed", help="Also one in the clear, where the daemon has a key.")
    ] = False,
) -> None:
    _transfer(context, "/admin/import", given(model=model, file=str(file)) | {"unsealed": unsealed}, "imported")


@command("trace")
def trace(
    context: CommandContext,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new one, below the daemon's [service] archives.")],
    duration: Annotated[str | None, typer.Option(metavar="TIME", help='As in "10min"; else until Ctrl-C.')] = None,
    model: ModelOption = None,
) -> None:
    body = given(model=model, file=str(file))
    if duration is not None:
        body["duration"] = parsed("--duration", duration, parse_duration)
    last: Json = {}
    try:
        for step in _steps(context.client, "/admin/trace", body):
            last = step
    except KeyboardInterrupt:
        if not last:
            raise
    counts = f"{last['recorded']} lookups, {last['dropped']} dropped, {last['bytes']} bytes"
    context.show(last, f"recorded {counts} in {file}")


def _server_of(context: CommandContext, url: str | None) -> "HttpClient":
    if url is None:
        return context.client
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f'--url "{url}": not a URL; write it as in http://127.0.0.1:8000')
    return context.elsewhere(url)


def _transfer(context: CommandContext, path: str, body: Json, done: str) -> None:
    last: Json = {}
    with progress_bar() as bar:
        advance = begin(bar, f"blocks {done}")
        for last in _steps(context.client, path, body):
            if "planned" in last:
                advance(last["blocks"], max(1, last["planned"]))
    lost = "".join(f", {count} lost ({reason})" for reason, count in last["lost"].items())
    size = show_size(last["bytes"])
    context.show(last, f"{done} {last['blocks']} of {last['planned']} blocks of {last['model']}, {size}{lost}")


def _steps(client: "HttpClient", path: str, body: Json) -> Iterator[Json]:
    """The lines of a transfer. KVTierError if it fails, or stops before its end."""
    last: Json = {}
    for last in client.lines(path, body):
        if "error" in last:
            raise (ConfigError if last.get("mistake") else KVTierError)(str(last["error"]))
        yield last
    if "done" not in last:
        raise KVTierError("the daemon closed the connection before the end; was it stopped?")


def _show_table(context: CommandContext, answer: Json, rows: list[Json], columns: tuple[str, ...]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(*(name.replace("_", " ") for name in columns))
    for row in rows:
        table.add_row(*(escape(harmless(_cell(column, row[column]))) for column in columns))
    show(answer, table, as_json=context.as_json)


def _cell(column: str, value: Any) -> str:
    return "-" if value is None else show_size(value) if column in _SIZES else str(value)


# --- what is read for options ----------------------------------------------------------------------------------------

_MAX_INPUT: Final = 64 << 20  # characters of a file of tokens or of text


def read(file: str, option: str) -> str:
    try:
        if file == "-":
            text = sys.stdin.read(_MAX_INPUT + 1)
            text.encode()  # without a locale, bytes that are not text get here
        else:
            with Path(file).open(encoding="utf-8") as opened:
                text = opened.read(_MAX_INPUT + 1)
    except OSError as error:
        raise ConfigError(f'{option} "{file}": {error.strerror}; name a file that can be read') from None
    except UnicodeError:
        raise ConfigError(f'{option} "{file}": not UTF-8 text; name a file of text') from None
    if len(text) > _MAX_INPUT:
        raise ConfigError(f'{option} "{file}": longer than {_MAX_INPUT:,} characters; name one prompt')
    return text


def read_list(file: str) -> list[Any]:
    text = read(file, "--blocks")
    wanted = "write a list of token ids or of block names"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'--blocks "{file}": not JSON ({error}); {wanted}') from None
    if not isinstance(values, list):
        raise ConfigError(f'--blocks "{file}": not a list; {wanted}')
    return values

"""One bucket through obstore: requests with a deadline, counted, their errors told apart. Knows no blocks."""

import re
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvtier.tiers import BATCH_BYTES, ConfigError, Outcome
from kvtier.tiers.config import ObjectsConfig

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode
    from obstore.store import ClientConfig, S3Store

SentPart = bytes | memoryview
_Brought = TypeVar("_Brought")

EXISTS: Final = "PreconditionFailed"  # the code of a refusal to create what is there
CERTIFICATE: Final = "certificate"  # the code if the server's is not accepted
BROKE_OFF: Final = "broke off"  # the code if the client itself failed: its credentials, or the URL, fit no request
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_CAUSE: Final = re.compile(r"\b(?:message|error): (\"[^\"]+\")")
_CERTIFICATE: Final = re.compile(r"\berror: InvalidCertificate\(\s*(?:\w+\(\s*)*(\w+)")
_RETRIED: Final = re.compile(r" in \S+s, after \d+ retries, max_retries: \d+, retry_timeout: \S+s ")
_LONGEST_WHY: Final = 200  # characters
_LONGEST_CA: Final = 4 << 20  # bytes
_TIMEOUTS: Final = ("kind: Timeout", "TimedOut", "RequestTimeout")
_NO_CREDENTIALS: Final = ("169.254.169.254", "169.254.170", "/latest/api/token", "security-credentials")
_CHUNK: Final = 256 << 10  # bytes handed on at once, if there are as many
_RETRIES: Final = 1  # of a request that failed early; of one that took its time there is none


class BucketError(Exception):
    """A request that brought nothing."""

    def __init__(self, outcome: Outcome, why: str, code: str = "") -> None:
        super().__init__(why)
        self.outcome = outcome
        self.code = code  # S3's word for it, `credentials`, CERTIFICATE or BROKE_OFF; empty if nobody answered


Arrived = memoryview | BucketError | None
"""Bytes of an object; why no more come; None when all have come."""


class ObjectRange(NamedTuple):
    """Bytes of an object: `end` is the one behind the last."""

    key: str
    start: int
    end: int


class Bucket:
    """Thread-safe. A request that got no answer in time is given up by the client itself: no thread waits for ever.

    `timeout` seconds are a request's, with all its bytes. One that failed early is tried once more.
    """

    def __init__(self, config: ObjectsConfig, store: "S3Store", timeout: float) -> None:
        """Over a client (`connect`)."""
        self._config = config
        self._store = store
        self.timeout = timeout
        self._pool = ThreadPoolExecutor(config.connections, thread_name_prefix="kvtier-objects")
        self._lock = Lock()  # guards what follows
        self._counts: Counter[str] = Counter()

    @classmethod
    def connect(cls, config: ObjectsConfig, num_bytes: int = BATCH_BYTES) -> "Bucket":
        """Asks nobody yet. A request may have `num_bytes`. ConfigError for what the client does not take."""
        timeout = config.connect_timeout + config.deadline + num_bytes / config.bandwidth
        return cls(config, client_of(config, timeout), timeout)

    def stream(self, wanted: Sequence[ObjectRange], deadline: float) -> Iterator[tuple[int, Arrived]]:
        """What comes of each, as it comes, by its place in `wanted`: bytes, and at the end None or why no more come.

        There may be fewer bytes than wanted, if an object ends before, but never more. Nothing comes after `deadline`
        (time.monotonic).
        """
        arrivals: SimpleQueue[tuple[int, Arrived]] = SimpleQueue()
        given_up = Event()
        waiting = set(range(len(wanted)))
        futures: list[Future[None]] = []
        try:
            for i, each in enumerate(wanted):
                future = self._pool.submit(self._bring, each, partial(_arrive, arrivals, i), given_up)
                future.add_done_callback(partial(_end_cancelled, arrivals, i))
                futures.append(future)
        except RuntimeError:  # closed meanwhile
            given_up.set()
            yield from ((i, BucketError(Outcome.CLOSED, "closed")) for i in waiting)
            return
        try:
            while waiting and (left := deadline - time.monotonic()) > 0:
                try:
                    i, arrived = arrivals.get(timeout=left)
                except Empty:
                    break
                if not isinstance(arrived, memoryview):
                    waiting.discard(i)
                yield i, arrived
            yield from ((i, BucketError(Outcome.TIMEOUT, "no answer in time")) for i in waiting)
        finally:
            given_up.set()
            for future in futures:
                future.cancel()

    def fetch(self, wanted: Sequence[ObjectRange], deadline: float) -> Iterator[tuple[int, memoryview | BucketError]]:
        """The same of small ranges, each when it is complete: all that came of it, or why not all did."""
        came: dict[int, list[memoryview]] = {i: [] for i in range(len(wanted))}
        for i, arrived in self.stream(wanted, deadline):
            if isinstance(arrived, memoryview):
                came[i].append(arrived)
            else:
                yield i, memoryview(b"".join(came[i])) if arrived is None else arrived

    def get(self, wanted: ObjectRange, deadline: float) -> memoryview:
        """One of `fetch`. BucketError."""
        ((_, answer),) = self.fetch([wanted], deadline)
        if isinstance(answer, BucketError):
            raise answer
        return answer

    def put(self, key: str, parts: Sequence[SentPart], *, only_new: bool = False) -> None:
        """Store an object, all of it or nothing. BucketError; of code EXISTS if `only_new` and there is one.

        The parts are sent from where they lie: their memory is the client's until this returns.
        """
        import obstore

        mode: PutMode = "create" if only_new else "overwrite"
        self._asked("put", lambda: obstore.put(self._store, key, list(parts), mode=mode, use_multipart=False))
        self._count("put")
        self._count_bytes("sent", sum(len(part) for part in parts))

    def delete(self, keys: Sequence[str]) -> None:
        """What is not there is no error. BucketError."""
        import obstore

        self._asked("delete", lambda: obstore.delete(self._store, list(keys)))
        self._count("delete")

    def counts(self) -> Mapping[str, int]:
        """Since the start: `requests_{get, put, delete}`, those that failed among them, and bytes each way."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """What is under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _bring(self, wanted: ObjectRange, arrive: Callable[[Arrived], None], given_up: Event) -> None:
        """Thread: one request, until all has come or nobody waits for it any more."""
        import obstore

        left = wanted.end - wanted.start
        end: BucketError | None = None
        options: GetOptions = {"range": (wanted.start, wanted.end)}
        try:
            answer = self._asked("get", lambda: obstore.get(self._store, wanted.key, options=options))
            chunks = answer.stream(min_chunk_size=_CHUNK)
            while left and not given_up.is_set() and (chunk := self._asked("get", lambda: next(chunks, None))):
                arrived = memoryview(chunk)[:left]
                left -= len(arrived)
                arrive(arrived)
        except BucketError as error:
            end = error
        else:
            self._count("get")
        self._count_bytes("received", wanted.end - wanted.start - left)
        arrive(end)

    def _asked(self, verb: str, request: Callable[[], _Brought]) -> _Brought:
        """What the client brings. BucketError, counted. A key id with a line's end makes it panic: no Exception."""
        from obstore.exceptions import BaseError

        try:
            return request()
        except BaseException as error:
            is_panic = type(error).__name__ == "PanicException"
            if not is_panic and not isinstance(error, BaseError | OSError | ValueError):
                raise
            self._count(verb)
            raise (_broken_off(error) if is_panic else error_of(error)) from None

    def _count(self, verb: str) -> None:
        with self._lock:
            self._counts[f"requests_{verb}"] += 1

    def _count_bytes(self, way: str, num_bytes: int) -> None:
        with self._lock:
            self._counts[f"bytes_{way}"] += num_bytes


def _arrive(arrivals: SimpleQueue[tuple[int, Arrived]], i: int, arrived: Arrived) -> None:
    arrivals.put((i, arrived))


def _end_cancelled(arrivals: SimpleQueue[tuple[int, Arrived]], i: int, ended: Future[None]) -> None:
    if ended.cancelled():  # it never began
        arrivals.put((i, BucketError(Outcome.CLOSED, "closed")))


def client_of(config: ObjectsConfig, timeout: float) -> "S3Store":
    """obstore's client for [objects]. ConfigError for what it does not take."""
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    assert config.bucket is not None
    options: ClientConfig = {
        "allow_http": (config.endpoint or "").startswith("http://"),
        "connect_timeout": timedelta(seconds=config.connect_timeout),
        "timeout": timedelta(seconds=timeout),
        "pool_max_idle_per_host": str(config.connections),
    }
    if config.ca is not None:
        options["root_certificate"] = _certificates(config)
    more = {
        "endpoint": _endpoint(config),
        "access_key_id": config.access_key_id,
        "secret_access_key": config.secret_access_key and config.secret_access_key.get_secret_value(),
    }
    try:
        return S3Store(
            config.bucket,
            region=config.region,
            virtual_hosted_style_request=config.virtual_hosted,
            unsigned_payload=True,  # every record has a checksum of its own: SHA-256 over all bytes would cost more
            client_options=options,
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": timedelta(seconds=config.deadline / 2),
                "backoff": {
                    "init_backoff": timedelta(seconds=0.05),
                    "max_backoff": timedelta(seconds=0.2),
                    "base": 2,
                },
            },
            **{name: value for name, value in more.items() if value is not None},  # type: ignore[arg-type]
        )
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(f'[objects] bucket "{config.bucket}": the client refuses it: {_flat(error)}') from None


def _endpoint(config: ObjectsConfig) -> str | None:
    """As the client takes it: with the bucket's name, if hosts have that. AWS's own it knows itself."""
    if config.endpoint is None or not config.virtual_hosted:
        return config.endpoint
    scheme, _, host = config.endpoint.partition("://")
    return config.endpoint if host.startswith(f"{config.bucket}.") else f"{scheme}://{config.bucket}.{host}"


def _certificates(config: ObjectsConfig) -> bytes:
    assert config.ca is not None
    try:
        if config.ca.exists() and not config.ca.is_file():  # a pipe would not end, nor would a device
            raise OSError(0, "not a regular file")
        with config.ca.open("rb") as file:
            text = file.read(_LONGEST_CA)
    except OSError as error:
        why = error.strerror or str(error)
    else:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError):
            why = "no certificates"
        else:
            return text
    raise ConfigError(f'[objects] ca "{config.ca}": {why}; name a PEM file of certificates') from None


def _broken_off(error: BaseException) -> BucketError:
    return BucketError(Outcome.IO_ERROR, f"its client broke off: {_flat(error)}", BROKE_OFF)


def error_of(error: BaseException) -> BucketError:
    """What obstore raised, as an outcome and S3's own word."""
    text = str(error)
    found = _CODE.search(text)
    code = found[1] if found else ""
    if any(place in text for place in _NO_CREDENTIALS):
        return BucketError(Outcome.IO_ERROR, _flat(error), "credentials")
    if found := _CERTIFICATE.search(text):
        return BucketError(Outcome.IO_ERROR, f"its certificate is not accepted ({found[1]})", CERTIFICATE)
    if type(error).__name__ == "AlreadyExistsError":
        return BucketError(Outcome.IO_ERROR, "it is there", EXISTS)
    if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
        return BucketError(Outcome.ABSENT, "not there", code)
    if code == "InvalidRange" or "416 Range Not Satisfiable" in text:
        return BucketError(Outcome.CHECKSUM, "the object is shorter", code)
    outcome = Outcome.TIMEOUT if any(word in text for word in _TIMEOUTS) else Outcome.IO_ERROR
    return BucketError(outcome, _flat(error), code)


def _flat(error: BaseException) -> str:
    """In one line, without what a server could steer a terminal with. What lies beneath stands in obstore's notes."""
    text, _, notes = str(error).partition("Debug source")
    causes = _CAUSE.findall(notes)
    text = " ".join((causes[-1].strip('"') if causes else _RETRIED.sub(" ", text)).split())[:_LONGEST_WHY]
    return "".join(each if each.isprintable() else "?" for each in text)

"""One bucket through obstore: requests with a deadline, counted, and errors as outcomes, with a fix for the user."""

import re
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kvtier.tiers import BATCH_BYTES, ConfigError, KVTierError, Outcome, TierUnavailable
from kvtier.tiers.config import ObjectsConfig
from kvtier.tiers.shared import StorageFailed

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode
    from obstore.store import ClientConfig, S3Credential, S3Store


SentPart = bytes | memoryview
_Result = TypeVar("_Result")

EXISTS: Final = "PreconditionFailed"  # the code if an object to be created exists
CERTIFICATE: Final = "certificate"  # the code if the server's is not accepted
BROKE_OFF: Final = "broke off"  # the code if the client itself failed: its credentials, or the URL, fit no request
NO_S3: Final = "no S3"  # the code if the server's reply is not S3's
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_CAUSE: Final = re.compile(r"\b(?:message|error): (\"[^\"]+\")")
_CERTIFICATE: Final = re.compile(r"\berror: InvalidCertificate\(\s*(?:\w+\(\s*)*(\w+)")
_RETRIED: Final = re.compile(r" in \S+s, after \d+ retries, max_retries: \d+, retry_timeout: \S+s ")
_LONGEST_WHY: Final = 200  # characters
_LONGEST_CA: Final = 4 << 20  # bytes
_ANOTHER_REGION: Final = "incorrectly configured region"  # the client's words for a 301 without an address
_TIMEOUTS: Final = ("kind: Timeout", "TimedOut", "RequestTimeout")
_NO_CREDENTIALS: Final = ("169.254.169.254", "169.254.170", "/latest/api/token", "security-credentials")
_PIECE: Final = 1 << 20  # bytes the client hands over at once: it joins what came, and smaller pieces cost more
_RETRIES: Final = 1  # of a request that failed early; a slow one is not repeated


TakeBytes = Callable[[memoryview], object]
_CLOSED: Final = StorageFailed(Outcome.CLOSED, "closed")


class ObjectRange(NamedTuple):
    """Bytes of an object, from `start` to before `end`."""

    key: str
    start: int
    end: int


class Bucket:
    """One bucket. A failure's code is S3's, `credentials`, CERTIFICATE, BROKE_OFF or NO_S3; empty without a reply.

    Thread-safe. `timeout` is the limit of a request with all its bytes, in seconds. The client itself ends a request
    without a reply in time, so no thread waits for ever. A request that failed early is tried once more.
    """

    def __init__(self, config: ObjectsConfig, store: "S3Store", timeout: float) -> None:
        """Over a client (`connect`)."""
        self._config = config
        self._store = store
        self.timeout = timeout
        self._pool = ThreadPoolExecutor(config.connections, thread_name_prefix="kvtier-objects")
        self._lock = Lock()  # guards what follows
        self._counts: Counter[str] = Counter()
        self._closed = False

    @classmethod
    def connect(cls, config: ObjectsConfig, num_bytes: int = BATCH_BYTES) -> "Bucket":
        """Sends no request yet. A request may have `num_bytes`. ConfigError if the client does not take an option."""
        timeout = config.connect_timeout + config.deadline + num_bytes / config.bandwidth
        return cls(config, client_of(config, timeout), timeout)

    def read_each(
        self, wanted: Sequence[ObjectRange], take: Sequence[TakeBytes], deadline: float
    ) -> Iterator[tuple[int, StorageFailed | None]]:
        """Request all ranges at once. Yields each one's place in `wanted` and its failure, None if all its bytes came.

        Bytes go to the range's `take` piece by piece, on another thread: never more than wanted. None comes after its
        failure was yielded, `deadline` (time.monotonic) has passed, or the caller has stopped.
        """
        receivers = [_Receiver(each) for each in take]
        futures: dict[Future[StorageFailed | None], int] = {}
        waiting: set[Future[StorageFailed | None]] = set()
        try:
            for i, each in enumerate(wanted):
                futures[self._pool.submit(self._read, each, receivers[i])] = i
            waiting.update(futures)
            for future in as_completed(futures, max(0.0, deadline - time.monotonic())):
                waiting.discard(future)
                yield futures[future], _CLOSED if future.cancelled() else future.result()
        except TimeoutError:
            for future in waiting:
                receivers[futures[future]].cancel()
                yield futures[future], StorageFailed(Outcome.TIMEOUT, "no answer in time")
        except RuntimeError:  # the pool takes no more requests
            if not self._closed:
                raise
            yield from ((i, _CLOSED) for i in range(len(wanted)))
        finally:
            for receiver in receivers:
                receiver.cancel()
            for future in futures:
                future.cancel()

    def fetch(self, wanted: Sequence[ObjectRange], deadline: float) -> Iterator[tuple[int, memoryview | StorageFailed]]:
        """The bytes of small ranges, each when it is complete; fewer if an object ends before."""
        came = [bytearray() for _ in wanted]
        for i, failure in self.read_each(wanted, [each.extend for each in came], deadline):
            yield i, failure or memoryview(came[i])

    def get(self, wanted: ObjectRange, deadline: float) -> memoryview:
        """One of `fetch`. StorageFailed."""
        ((_, answer),) = self.fetch([wanted], deadline)
        if isinstance(answer, StorageFailed):
            raise answer
        return answer

    def put(self, key: str, parts: Sequence[SentPart], *, only_new: bool = False) -> None:
        """Store all of an object, from where its parts lie. StorageFailed; EXISTS if `only_new` and it is there."""
        import obstore

        mode: PutMode = "create" if only_new else "overwrite"
        self._request("put", lambda: obstore.put(self._store, key, list(parts), mode=mode, use_multipart=False))
        self._count("put")
        self._count_bytes("sent", sum(len(part) for part in parts))

    def delete(self, keys: Sequence[str]) -> None:
        """Objects that do not exist are no error. StorageFailed."""
        import obstore

        self._request("delete", lambda: obstore.delete(self._store, list(keys)))
        self._count("delete")

    def counts(self) -> Mapping[str, int]:
        """Since the start: `requests_{get, put, delete}`, with failed ones, and bytes each way."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Requests under way end by themselves."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, wanted: ObjectRange, receiver: "_Receiver") -> StorageFailed | None:
        """Thread: one request, until all bytes came or it is cancelled."""
        import obstore

        num_bytes = left = wanted.end - wanted.start
        options: GetOptions = {"range": (wanted.start, wanted.end)}
        try:
            answer = self._request("get", lambda: obstore.get(self._store, wanted.key, options=options))
            pieces = answer.stream(min_chunk_size=_PIECE)
            while left and (piece := self._request("get", lambda: next(pieces, None))):
                came = memoryview(piece)[:left]
                left -= len(came)
                if not receiver.take(came):
                    break
        except StorageFailed as error:
            return error
        else:
            self._count("get")
        finally:
            self._count_bytes("received", num_bytes - left)
        return None

    def _request(self, verb: str, request: Callable[[], _Result]) -> _Result:
        """The request's result. StorageFailed, counted. A key id with a line's end makes it panic: no Exception."""
        from obstore.exceptions import BaseError

        try:
            return request()
        except BaseException as error:
            is_panic = type(error).__name__ == "PanicException"
            if not is_panic and not isinstance(error, BaseError | OSError | ValueError):
                raise
            self._count(verb)
            if is_panic:
                why = f"its client broke off: {_flat(error)}"
                raise StorageFailed(Outcome.IO_ERROR, why, BROKE_OFF) from None
            raise error_of(error) from None

    def _count(self, verb: str) -> None:
        with self._lock:
            self._counts[f"requests_{verb}"] += 1

    def _count_bytes(self, way: str, num_bytes: int) -> None:
        with self._lock:
            self._counts[f"bytes_{way}"] += num_bytes


class _Receiver:
    """Passes on a request's bytes until it is cancelled."""

    def __init__(self, take: TakeBytes) -> None:
        self._take = take
        self._lock = Lock()
        self._cancelled = False

    def take(self, came: memoryview) -> bool:
        """False if it is cancelled."""
        with self._lock:
            if not self._cancelled:
                self._take(came)
            return not self._cancelled

    def cancel(self) -> None:
        """Pass on no more bytes. Waits for those being passed on."""
        with self._lock:
            self._cancelled = True


def client_of(config: ObjectsConfig, timeout: float) -> "S3Store":
    """obstore's client for [objects]. ConfigError if it does not take an option."""
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
    more: dict[str, Any] = {"endpoint": _endpoint(config), "credential_provider": _credentials(config)}
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
            **{name: value for name, value in more.items() if value is not None},
        )
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(f'[objects] bucket "{config.bucket}": the client refuses it: {_flat(error)}') from None


def _credentials(config: ObjectsConfig) -> "Callable[[], S3Credential] | None":
    """The options' own. By a callback: else a session token among AWS's variables would be sent with them."""
    if config.access_key_id is None or config.secret_access_key is None:
        return None
    token = None if config.session_token is None else config.session_token.get_secret_value()
    own: S3Credential = {
        "access_key_id": config.access_key_id,
        "secret_access_key": config.secret_access_key.get_secret_value(),
        "token": token,
        "expires_at": None,
    }
    return lambda: own


def _endpoint(config: ObjectsConfig) -> str | None:
    """As the client takes it: with the bucket's name for virtual hosts. None: AWS's, which the client knows."""
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


def error_of(error: BaseException) -> StorageFailed:
    """What obstore raised, as an outcome and S3's code."""
    text = str(error)
    found = _CODE.search(text)
    code = found[1] if found else ""
    if any(place in text for place in _NO_CREDENTIALS):
        return StorageFailed(Outcome.IO_ERROR, _flat(error), "credentials")
    if found := _CERTIFICATE.search(text):
        return StorageFailed(Outcome.IO_ERROR, f"its certificate is not accepted ({found[1]})", CERTIFICATE)
    if type(error).__name__ == "AlreadyExistsError":
        return StorageFailed(Outcome.IO_ERROR, "it is there", EXISTS)
    if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
        if not code:  # any web server may reply so
            return StorageFailed(Outcome.IO_ERROR, "404 without an S3 error code", NO_S3)
        return StorageFailed(Outcome.ABSENT, "not there", code)
    if _ANOTHER_REGION in text:
        return StorageFailed(Outcome.IO_ERROR, "it is in another region", "PermanentRedirect")
    if code == "InvalidRange" or "416 Range Not Satisfiable" in text:
        return StorageFailed(Outcome.CHECKSUM, "the object is shorter", code)
    outcome = Outcome.TIMEOUT if any(word in text for word in _TIMEOUTS) else Outcome.IO_ERROR
    return StorageFailed(outcome, _flat(error), code)


def _flat(error: BaseException) -> str:
    """In one line, without control characters that a server could send to a terminal. Causes are in obstore's notes."""
    text, _, notes = str(error).partition("Debug source")
    causes = _CAUSE.findall(notes)
    text = " ".join((causes[-1].strip('"') if causes else _RETRIED.sub(" ", text)).split())[:_LONGEST_WHY]
    return "".join(each if each.isprintable() else "?" for each in text)


RIGHTS: Final = "s3:GetObject, s3:PutObject and s3:DeleteObject on its objects and s3:ListBucket on itself"
_WRONG_KEY: Final = ("SignatureDoesNotMatch", "AuthFailure")
_WRONG_ID: Final = ("InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId")
_IN_TIME: Final = {  # errors that pass or can be fixed without another setting
    "ExpiredToken": "its credentials have expired; renew them",
    "ExpiredTokenException": "its credentials have expired; renew them",
    "RequestTimeTooSkewed": "the store's clock and this machine's differ; set them",
}


def place_of(config: ObjectsConfig) -> str:
    """Where the bucket is."""
    return config.endpoint or f"AWS, {config.region}"


def explanation(config: ObjectsConfig, error: StorageFailed) -> KVTierError:
    """ConfigError if trying again later would not help, else TierUnavailable."""
    where = place_of(config)
    if error.code == "credentials":
        return ConfigError(
            "[objects] access_key_id: none is given, and neither AWS's variables nor this machine's role have one; set "
            "it and secret_access_key"
        )
    if error.code == "NoSuchBucket":
        return ConfigError(f'[objects] bucket "{config.bucket}": {where} has none of that name; create it, or fix it')
    if error.code in _WRONG_KEY:
        return ConfigError(f"[objects] secret_access_key (not shown): {where} refuses it; set the right one")
    if error.code in _WRONG_ID:
        return ConfigError(f"[objects] access_key_id: {where} refuses it ({error.code}); set the right one")
    if error.code in ("AccessDenied", "AllAccessDisabled", "AccountProblem"):
        return ConfigError(f'[objects] bucket "{config.bucket}": {where} denies access; grant {RIGHTS}')
    if error.code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"):
        return ConfigError(f'[objects] region "{config.region}": the bucket is in another; set its own')
    in_time = {
        **_IN_TIME,
        CERTIFICATE: f"{error}; name the file of who signed it as ca",
        BROKE_OFF: f"{error}; see whether AWS's variables, or what the role gives, hold a line's end",
        NO_S3: f"no S3 ({error}); set endpoint to the address of one",
        "": f"{error}; see whether it runs, and is reached from here",
    }
    why = in_time.get(error.code, f"it answers {error.code}; see what that means there")
    return TierUnavailable(f"[objects] {where}: {why}")

"""One command to a Redis server, answered as `redis-cli` would print it: without a process for each."""

import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import IO


class RedisError(RuntimeError):
    """The server says an error, or nobody answers."""


def ask(
    port: int, *arguments: str | bytes, password: str | None = None, authority: Path | None = None, timeout: float
) -> bytes:
    """What the server on that port of this machine answers, on a connection of its own.

    Elements of an array are lines, and nothing is an empty one. With an `authority` the connection is TLS.
    As with redis-cli, a password that the server does not want is none of the command's business.
    """
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout) as plain,
            _secured(plain, authority) as line,
            line.makefile("rb") as answers,
        ):
            if password is not None:
                line.sendall(_packed("AUTH", password))
                with suppress(RedisError):
                    _answer(answers)
            line.sendall(_packed(*arguments))
            return _answer(answers)
    except OSError as error:
        raise RedisError(f"port {port}: {error}") from error


def _secured(line: socket.socket, authority: Path | None) -> socket.socket:
    if authority is None:
        return line
    return ssl.create_default_context(cafile=authority).wrap_socket(line, server_hostname="127.0.0.1")


def _packed(*arguments: str | bytes) -> bytes:
    words = [word.encode() if isinstance(word, str) else word for word in arguments]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _answer(answers: IO[bytes]) -> bytes:
    """The next answer; RedisError if it is an error, or if the connection ends before it does."""
    head = answers.readline()
    kind, told = head[:1], head[1:].removesuffix(b"\r\n")
    if not head.endswith(b"\r\n"):
        raise RedisError("the server hung up")
    if kind == b"-":
        raise RedisError(told.decode(errors="replace"))
    if kind in b"+:":
        return told
    number = int(told)
    if number < 0:  # nothing
        return b""
    if kind == b"*":
        return b"\n".join([_answer(answers) for _ in range(number)])
    assert kind == b"$", head
    data = answers.read(number + 2)
    if len(data) < number + 2:
        raise RedisError("the server hung up")
    return data[:-2]

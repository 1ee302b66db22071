"""Environment variables besides the configuration: this user's cache, extension modules, and what libraries read."""

import os
import re
from pathlib import Path
from typing import Final

from kvtier.tiers import tracing

_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
COMPILED: Final = "KVTIER_COMPILED"  # "off": no extension module is used


def cache_directory() -> Path:
    """This user's directory for measurements and builds, by the XDG specification; a relative path is ignored."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "")
    base = Path(given) if os.path.isabs(given) else Path(home if os.path.isabs(home) else "/") / ".cache"
    return base / "kvtier"


def compiled_setting() -> str:
    """The value of `KVTIER_COMPILED`; empty: not given."""
    return os.environ.get(COMPILED, "")


def preset(name: str, value: str) -> None:
    """Set a variable for libraries of this process that read it, unless the user has."""
    os.environ.setdefault(name, value)


def otlp_target(configured: str | None) -> tracing.OtlpTarget | None:
    """Where spans go: to the `configured` collector, else as OpenTelemetry's variables say. None: nowhere."""
    exporter, of_traces = os.environ.get("OTEL_TRACES_EXPORTER", ""), "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return None
    if configured is not None:
        return tracing.OtlpTarget(f"{configured}/v1/traces")
    base, url = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"), os.environ.get(of_traces)
    if not url and not base and exporter != "otlp":
        return None
    url = url or f"{(base or 'http://localhost:4318').rstrip('/')}/v1/traces"
    protocol = next((value for name in _PROTOCOLS if (value := os.environ.get(name))), "http/protobuf")
    if protocol != "http/protobuf" or not url.startswith(("http://", "https://")):
        shown = tracing.OtlpTarget(url).shown
        why = f"[tracing] {shown} by {protocol}: spans go by http/protobuf; set [tracing] endpoint to a port for that"
        return tracing.OtlpTarget(url, why)
    return tracing.OtlpTarget(url)


_COMPUTES: Final = re.compile(r"QUANT|FP4|FP8|INT4|INT8|W4A|DTYPE|PRECISION|SIMULAT|SKIP_SOFTMAX|_SAGE|EXTERNAL_MODEL")


def engine_variables(prefix: str) -> str:
    """Environment variables of an engine that change what it computes with the same weights, as they are set."""
    found = sorted(each for each in os.environ.items() if each[0].startswith(prefix) and _COMPUTES.search(each[0]))
    return "".join(f" {name}={value}" for name, value in found)

"""Sessions of a trace: what equal blocks were equal there is equal here, at the trace's own times."""

import random
from pathlib import Path
from typing import Final

from kvtier.service.bench.patterns import ScriptedSession, ScriptedTurn, words
from kvtier.service.traces import TraceLine, load_lines
from kvtier.tiers import ConfigError

_BLOCK: Final = 512  # tokens of a block where the trace does not say
_MOST: Final = 1 << 28  # tokens of all requests: their texts are made before anybody is asked


def sessions_of_trace(path: Path, num_requests: int, answer_tokens: int, speed: float) -> list[ScriptedSession]:
    """One session for each of the first requests; times are divided by `speed`. ConfigError as `load_lines`."""
    if not speed > 0:
        raise ConfigError(f"speed {speed}: use a number above 0; 2 is twice as fast as the trace")
    lines = load_lines(path, num_requests)
    if (num_tokens := sum(line.input_length for line in lines)) > _MOST:
        fix = f"ask for at most {_MOST}, by fewer --requests"
        raise ConfigError(f"{path}: input_length: {num_tokens} tokens in {len(lines)} requests; {fix}")
    return [_session(number, line, answer_tokens, speed) for number, line in enumerate(lines)]


def _session(number: int, line: TraceLine, answer_tokens: int, speed: float) -> ScriptedSession:
    """A block's words follow from its number. Without times, sessions begin at the pace that is asked for."""
    size, left, texts = line.block_size or _BLOCK, line.input_length, []
    for name in line.hash_ids:
        texts.append(words(random.Random(name), min(size, left)))
        left -= size
        if left <= 0:
            break
    at = line.timestamp / 1000 / speed if line.has_time else None
    return ScriptedSession(number, "", [ScriptedTurn(" ".join(texts), line.output_length or answer_tokens)], at)

"""JSON values out of a fuzzer's bytes, for fuzz_http.py and fuzz_settings.py: chance alone would never write them."""

from collections.abc import Sequence
from typing import Any, Final

import atheris

CHAT_NAMES: Final = ("role", "content", "type", "text", "name", "tool_calls", "function", "arguments", "parameters")
_WORDS: Final = ("user", "assistant", "system", "tool", "text", "a" * 64, "ab12", "/file", "1MiB", "10s", "\ud800", "")


class Maker:
    """JSON values out of bytes, with the names and words that a parser looks for."""

    def __init__(self, data: bytes, names: Sequence[str]) -> None:
        self._provider = atheris.FuzzedDataProvider(data)
        self._names = names

    def body(self, required: Sequence[str] = ()) -> dict[str, Any]:
        """An object, as a rule with the fields that must be there."""
        made = {name: self.value(3) for name in required if self._number(20)}
        return made | self.mapping(3)

    def mapping(self, depth: int) -> dict[str, Any]:
        return {self.text(): self.value(depth - 1) for _ in range(self._number(5))}

    def value(self, depth: int) -> Any:
        kind = self._number(9 if depth else 6)
        if kind == 7:
            return [self.value(depth - 1) for _ in range(self._number(4))]
        if kind >= 8:
            return self.mapping(depth)
        scalars = (None, True, self._provider.ConsumeInt(9), self._number(300), self._provider.ConsumeFloat())
        return scalars[kind] if kind < len(scalars) else self.text()

    def text(self) -> str:
        kind = self._number(3)
        if kind == 0:
            return str(self._provider.ConsumeUnicode(self._number(40)))
        words = self._names if kind < 3 else _WORDS
        return words[self._number(len(words) - 1)]

    def is_so(self) -> bool:
        """Of four times, once."""
        return self._number(3) == 0

    def _number(self, most: int) -> int:
        return int(self._provider.ConsumeIntInRange(0, most))

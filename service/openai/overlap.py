"""How much of a text's end may begin a mark that is looked for: so much is held back until that is decided."""


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text may begin the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)

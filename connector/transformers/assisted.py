"""Assisted and prompt lookup decoding behind loaded tokens: the first pass is given what the cache lacks."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_PREPARE: Final = "prepare_inputs_for_generation"


@contextmanager
def going_on_from(model: Any, num_columns: int) -> Iterator[None]:
    """While it is open, `model.generate` with an assistant goes on behind `num_columns` of its cache.

    transformers does so by itself for every other way of decoding. With an assistant its first pass has the whole
    prompt, whatever the cache holds (from 5.6 on; before, positions in the cache told it).
    """
    prepare = model.prepare_inputs_for_generation
    if not num_columns or "next_sequence_length" not in inspect.signature(prepare).parameters:
        yield
        return

    @functools.wraps(prepare)
    def prepare_the_rest(input_ids: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("is_first_iteration") and options.get("next_sequence_length") is None:
            options["next_sequence_length"] = input_ids.shape[1] - num_columns
        return prepare(input_ids, *arguments, **options)

    patched = vars(model).get(_PREPARE)  # of this model alone, by an adapter library
    model.prepare_inputs_for_generation = prepare_the_rest
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation  # the class's own again
        if patched is not None:
            model.prepare_inputs_for_generation = patched

"""Which inputs go through the model together: as many as the memory budget holds, the same ones every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from understudy.inputs.batch import Batch, Inputs

# More inputs at once gain nothing: rows are what fills the batch. Not the length that texts often have.
_MOST_INPUTS = 96


def batches(
    inputs: Inputs,
    span: range,
    *,
    most: int | None,
    bytes_each: Callable[[int], int],
    budget: int,
    tokens: int | None,
) -> Iterator[tuple[list[int], Batch]]:
    """The inputs of a span in their order, and their batch dicts.

    most: at most so many; by default what a quarter of the budget holds, at `bytes_each(tokens)` for each. tokens: of
    every input; None where texts tell it themselves.
    """
    start = span.start
    while start < span.stop:
        size = most or (_MOST_INPUTS if tokens is None else _fitting(tokens, bytes_each, budget))
        indices = list(range(start, min(start + size, span.stop)))
        batch = inputs.batch(indices)

        def length(batch: Batch) -> int:
            return tokens or (batch["input_ids"].shape[1] if "input_ids" in batch else 0)

        # Texts differ in length: what fits is known only now. Fewer texts may be shorter ones, so this is repeated.
        while most is None and tokens is None and len(indices) > _fitting(length(batch), bytes_each, budget):
            indices = indices[: max(1, min(len(indices) - 1, _fitting(length(batch), bytes_each, budget)))]
            batch = inputs.batch(indices)
        # As many inputs as tokens: a table over tokens could be taken for one over inputs.
        while length(batch) == len(indices) > 1:
            indices.pop()
            batch = inputs.batch(indices)
        yield indices, batch
        start += len(indices)


def _fitting(tokens: int, bytes_each: Callable[[int], int], budget: int) -> int:
    return max(1, min(_MOST_INPUTS, budget // 4 // bytes_each(max(tokens, 1))))

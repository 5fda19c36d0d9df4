"""Memory that ran out: told apart from other failures, on every kind of device."""

from __future__ import annotations

import torch

# How torch's allocators without an exception class of their own say it.
_WORDS = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether a failure is one of memory, so that smaller pieces may succeed.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("shapes differ"))
    (True, False)
    """
    if isinstance(problem, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and any(word in str(problem).lower() for word in _WORDS)


def free_cached() -> None:
    """Give back what torch's allocator holds for later, where it does."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

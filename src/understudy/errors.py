"""The one exception for wrong use, and its kind for work that could not be finished."""


class UnderstudyError(ValueError):
    """What was given cannot be done; the message says what was given, what is possible and what to do."""


class Unfinished(UnderstudyError):
    """Work that failed on the way; the message says what is kept and how to go on."""

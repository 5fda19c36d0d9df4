"""The one exception for wrong use."""


class UnderstudyError(ValueError):
    """What was given cannot be done; the message says what was given, what is possible and what to do."""

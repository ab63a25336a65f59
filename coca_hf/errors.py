"""The one exception that people see: what was wrong with what they gave us, and what to do."""


class CocaError(ValueError):
    """Bad input or surroundings. The message is one line: where, got, expected, remedy. The commands exit with 2."""

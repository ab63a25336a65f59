"""The one exception that people see: what was wrong with what they gave us, and what to do."""

LONGEST = 1000


class CocaError(ValueError):
    """Bad input or surroundings. The message is one line: where, got, expected, remedy. The commands exit with 2.

    Names and values out of other people's files are part of messages, so line breaks and what else cannot be printed
    become escapes, and the middle of a very long message is left out.
    """

    def __init__(self, message: str):
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))

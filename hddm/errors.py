"""The one exception for what a user can mend."""


class HddmError(ValueError):
    """A failure that the caller can mend.

    The message is one line that names the file or option, the value and the remedy. The command
    line prints it without a traceback and exits with code 1.
    """

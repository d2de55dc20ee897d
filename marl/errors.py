"""What goes wrong by someone's input rather than by our mistake."""


class UserError(ValueError):
    """Bad input: its text is one clear sentence that names the setting or file, its value, and the fix.

    Commands print the sentence and leave with a non-zero status, without a traceback.
    """

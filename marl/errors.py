"""What goes wrong by someone's input rather than by our mistake."""

from __future__ import annotations

import tempfile
from pathlib import Path


class UserError(ValueError):
    """Bad input: its text is one clear sentence that names the setting or file, its value, and the fix.

    Commands print the sentence and leave with a non-zero status, without a traceback.
    """


def check_writable(folder: Path, setting: str) -> None:
    """Makes the folder. UserError, naming the setting, if nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{setting}={folder}: the folder cannot be written ({error.strerror}); name another") from error

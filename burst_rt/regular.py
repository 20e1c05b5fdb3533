"""Opening a file in a folder where others may write: a regular file only, never through a link.

A named pipe in the file's place would be waited for without end, and what a link leads to may be
somebody's. Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["NOT_REGULAR", "open_regular"]

# What `open_regular` raises for a link, a folder, a pipe or a socket.
NOT_REGULAR = (errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO)


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of the file, for the caller to close. Never waits.

    flags: as for `os.open`. Raises OSError, also where something else than a regular file lies
    there.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor

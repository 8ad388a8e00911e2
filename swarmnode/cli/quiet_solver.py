"""Keeps what HiGHS prints from within out of a command's output."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_solver() -> Iterator[None]:
    """For a command with one thread: standard output of the whole process goes nowhere meanwhile.

    Some HiGHS builds print a line of debugging for rare problems whatever their options say, from C++.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)

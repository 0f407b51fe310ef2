"""A thread without the capabilities of root, as the agent runs in Kubernetes: rights of files count for it."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

VERSION = 0x20080522
"""Of the kernel's interface: two sets of 32 capabilities each."""
LIBC = ctypes.CDLL(None, use_errno=True)


class Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def call(name: str, sets: ctypes.Array[Sets]) -> None:
    if getattr(LIBC, name)(ctypes.byref(Header(VERSION, 0)), sets):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


@contextmanager
def without_capabilities() -> Iterator[None]:
    """This thread has none in the block, and those that it had afterwards."""
    had, none = (Sets * 2)(), (Sets * 2)()
    call("capget", had)
    for before, now in zip(had, none, strict=True):
        now.permitted, now.inheritable = before.permitted, before.inheritable
    call("capset", none)
    try:
        yield
    finally:
        call("capset", had)

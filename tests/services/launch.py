"""Become another program, as another user if asked, which ends when the process that started it ends.

Run as `python -I -S launch.py SIGNAL UID GID PARENT_PID COMMAND…`. An in-between program is used because
Python code between fork and exec is unsafe in a process with threads, and because the kernel forgets the
death signal whenever the user changes, so that it has to be asked for last.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    death_signal, uid, gid, parent = map(int, sys.argv[1:5])
    command = sys.argv[5:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if prctl is not None and prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent:  # it died before the signal was asked for
        sys.exit(1)
    os.execv(command[0], command)


main()

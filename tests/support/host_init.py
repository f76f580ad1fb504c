"""The first process of a host of `hosts_lab.py`: reaps orphans, and ends, with the whole host, when its input
does. So no host outlives the tests."""

import os
import select
import signal

signal.signal(signal.SIGCHLD, lambda *_: None)
reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
signal.set_wakeup_fd(writer)
print("up", flush=True)
while True:
    ready = select.select([0, reader], [], [])[0]
    if 0 in ready and not os.read(0, 4096):
        os._exit(0)
    if reader in ready:
        os.read(reader, 4096)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

"""`python` and `kvtier` of a folder that fork_rig.py makes: asks for a fork, hands its streams over, ends as it ends.

A program that starts these starts forks, therefore. Signals go on to the fork; one of the shim's own ends kills it.
"""

import json
import os
import signal
import socket
import sys

MOST = 1 << 16
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """See the top."""
    own = os.path.abspath(__file__)
    home, name = os.path.split(own)
    arguments = ["-m", "kvtier.cli", *sys.argv[1:]] if name == "kvtier" else sys.argv[1:]
    if arguments[:1] in (["-P"], ["-u"]):  # no fork has the current directory in its path; execnet reads no stream
        del arguments[0]
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(os.path.join(home, "socket"))
    asked = {"start": arguments, "env": dict(os.environ), "cwd": os.getcwd()}
    if name != "worker":
        asked["python"] = os.path.join(home, "python")
    socket.send_fds(link, [json.dumps(asked).encode()], [0, 1, 2])
    fork = json.loads(link.recv(MOST))
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(fork, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = json.loads(link.recv(MOST) or b"1")  # nothing: the parent has ended
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()

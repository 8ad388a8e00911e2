"""A child process that misbehaves as it is told by its configuration. Run by test_children.py."""

import os
import sys
import time

from swarmnode.processes.channel import CHANNEL_VARIABLE, Channel, ChannelClosed


def main() -> int:
    channel = Channel.from_environment()
    descriptor = int(os.environ[CHANNEL_VARIABLE])
    configuration = channel.receive(30)
    assert configuration is not None
    what = configuration["what"]
    if what == "crash":
        return 3
    if what == "hang before ready":
        time.sleep(600)
    if what == "fail":
        channel.send({"type": "failed", "reason": "no such model: choose another"})
        return 1
    channel.send({"type": "ready"})
    if what == "fail once ready" and not configuration["again"]:
        channel.send({"type": "failed", "reason": "the disk is full"})
        return 1
    if what == "flood":
        for number in range(3000):
            channel.send({"type": "number", "number": number, "padding": b"x" * 1000})
    if what == "garbage":
        os.write(descriptor, b"\0\0\0\4junk")
    if what == "endless frame":
        os.write(descriptor, b"\xff\xff\xff\xff")
    if what == "hang up":
        os.close(descriptor)
        time.sleep(600)
    if what == "log":
        print("x" * 4096, flush=True)
    try:
        while True:
            message = channel.receive(None)
            if message is None:
                continue
            if message["type"] == "stop" and what != "ignore stop":
                return 0
            channel.send({**message, "pid": os.getpid()})
    except ChannelClosed:
        return 1


if __name__ == "__main__":
    sys.exit(main())

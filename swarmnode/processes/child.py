"""How a child process lives: takes its channel and signals, works, tells its node why if it cannot go on."""

import contextlib
import logging
from collections.abc import Callable

from swarmnode.processes.channel import Channel, ChannelClosed
from swarmnode.processes.inbox import Inbox, Stopped

log = logging.getLogger(__name__)


class Failure(Exception):
    """The process cannot go on; the message is one line that says what to do."""


def run_child(work: Callable[[Channel, Inbox], None], known_failures: tuple[type[Exception], ...]) -> int:
    """Run `work` until the node asks for an end; returns the exit code.

    What a person can mend (`Failure` and `known_failures`) is sent to the node as "failed". Anything else is
    a bug: it leaves a traceback in the log, and the node starts the process again.
    """
    mendable: tuple[type[Exception], ...] = (Failure, *known_failures)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = Channel.from_environment()
    inbox = Inbox(channel)
    inbox.take_signals()
    inbox.start()
    try:
        work(channel, inbox)
    except Stopped:
        return 0
    except ChannelClosed:
        return 1
    except mendable as error:
        log.error("%s", error)
        with contextlib.suppress(ChannelClosed):
            channel.send({"type": "failed", "reason": " ".join(str(error).split())})
        return 1
    return 0

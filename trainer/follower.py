"""A process that holds a part of a policy and does what the leader says, until it says "stop".

torchrun --nproc-per-node N … with a leader at rank 0, or started by `trainer.distributed`
"""

import logging
import signal
import sys

from trainer.distributed import LeaderGone, Processes
from trainer.sharded_policy import follow

log = logging.getLogger(__name__)


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # the leader's to deal with: it still needs this one's part
    processes = Processes(sys.argv[1])
    try:
        follow(processes)
    except LeaderGone as gone:
        log.warning("%s", gone)
        sys.exit(1)
    processes.leave()


if __name__ == "__main__":
    main()

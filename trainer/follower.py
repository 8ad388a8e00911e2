"""A process that holds a part of a policy and does what the leader says, until it says "stop".

python -m trainer.follower DEVICE MEETING      as `trainer.distributed.started_followers` starts it
"""

import logging
import signal
import sys
from pathlib import Path

from trainer.distributed import LeaderGone, Processes
from trainer.sharded_policy import follow

log = logging.getLogger(__name__)


def main() -> None:
    device_type, meeting = sys.argv[1:]
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # the leader's to deal with: it still needs this one's part
    processes = Processes(device_type, Path(meeting))
    try:
        follow(processes)
    except LeaderGone as gone:
        log.warning("%s", gone)
        sys.exit(1)
    processes.leave()


if __name__ == "__main__":
    main()

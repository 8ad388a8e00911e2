"""The learner process, but no delta is small enough for it: every version goes out as a snapshot."""

import sys

from swarmnode.processes.learner import main
from trainer import publication

if __name__ == "__main__":
    publication.LARGEST_DELTA = 0.0
    sys.exit(main())

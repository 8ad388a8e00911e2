"""Hard limits of the wire. Nothing here can be configured: two nodes that disagree on a limit cannot talk.

Every limit is checked before the memory it bounds is allocated.
"""

PROTOCOL_VERSION = 1
"""Changes when a node of the old version could misread a message of the new one."""

MAX_ENVELOPE_BYTES = 4 * 1024 * 1024
"""Largest signed message. A group of 64 completions of 4,096 tokens is 2.1 MB; chunks do not travel in
envelopes."""

MAX_ANNOUNCEMENT_BYTES = 8 * 1024
"""Largest gossip message. Gossip reaches every node, so it carries names of things and never the things."""

MAX_CHUNK_BYTES = 4 * 1024 * 1024
"""Largest chunk of a snapshot: the unit that is hashed, verified and served onward."""

DEFAULT_CHUNK_BYTES = 1024 * 1024

MAX_CHUNKS = 120_000
"""Chunks in one manifest, the delta's included (34 bytes each, so that it fits an envelope): 468 GiB of
weights at the largest chunk size."""

MAX_SAFETENSORS_HEADER_BYTES = 64 * 1024 * 1024

MAX_REGIONS = 65_536
"""Times that the width of elements changes within one snapshot (a model in one precision: once)."""

MAX_DEPTH = 12
"""Nesting of maps and lists in one message."""

MAX_VALUES = 160_000
"""Values in one message: scalars, keys, lists and maps together. Bounds the memory and time of decoding."""

MAX_NAME_CHARS = 64
MAX_ADDRESS_CHARS = 256
MAX_ADDRESSES = 16
MAX_TASKS = 256
MAX_ASSETS = 64
MAX_PEERS_PER_REPLY = 64

MAX_GROUP_SIZE = 64
MAX_COMPLETION_TOKENS = 32_768
MAX_VERSION_RUNS = 64
"""Versions that one completion's tokens may come from."""
MAX_TEXT_CHARS = 262_144
MAX_TOKEN_ID = 2**31 - 1
MAX_VERSION = 2**40
MAX_COUNTER = 2**40
MAX_SEQUENCE = 2**63 - 1
MAX_PROBE_TOKENS = 64
MAX_MAGNITUDE = 1e12
"""Largest absolute value of a number in a message: sums and squares of such numbers stay finite."""

TRAIN_SEED_LIMIT = 2**31
"""Training seeds lie in [0, 2^31)."""
HELD_OUT_SEED_LIMIT = 2**32
"""Held-out seeds lie in [2^31, 2^32): no prompt seed that a node derives can fall there."""

REPLAY_WINDOW = 4_096
"""How far behind the highest sequence number of a sender a message may still arrive."""

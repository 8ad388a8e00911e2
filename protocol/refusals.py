"""Why something from a peer was refused: the closed list of reasons that are counted, shown and sent back."""

import re
from enum import StrEnum

MAX_DETAIL_CHARS = 512

HIDDEN_CHARS = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
"""What shows nothing in a log or terminal, moves its cursor, or turns the direction of the text (as in a
regex's [ ])."""

_unfit = re.compile(f"[{HIDDEN_CHARS}\ud800-\udfff]")


def one_line(text: str, max_chars: int = MAX_DETAIL_CHARS) -> str:
    """`text` fit for a log line: cut to `max_chars`, hidden characters and lone surrogates replaced by
    spaces."""
    cut = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
    return _unfit.sub(" ", cut)


class RefusalReason(StrEnum):
    """One word per cause. The value travels in receipts and is the label in metrics."""

    OVERSIZED = "oversized"
    MALFORMED = "malformed"
    WRONG_PROTOCOL = "wrong_protocol"
    WRONG_RUN = "wrong_run"
    WRONG_KIND = "wrong_kind"
    BAD_SIGNATURE = "bad_signature"
    WRONG_SENDER = "wrong_sender"
    REPLAYED = "replayed"
    UNKNOWN_POLICY = "unknown_policy"
    UNKNOWN_TASK = "unknown_task"
    WRONG_SEED = "wrong_seed"
    WRONG_SAMPLING = "wrong_sampling"
    RAGGED_GROUP = "ragged_group"
    BAD_LOGPROBS = "bad_logprobs"
    BAD_TOKENS = "bad_tokens"
    BAD_VERSIONS = "bad_versions"
    FUTURE_VERSION = "future_version"
    TOO_STALE = "too_stale"
    PROMPT_MISMATCH = "prompt_mismatch"
    REWARD_MISMATCH = "reward_mismatch"
    NO_CREDIT = "no_credit"
    WRONG_HASH = "wrong_hash"
    NOT_FOUND = "not_found"
    NOT_A_LEARNER = "not_a_learner"
    BUSY = "busy"
    VERIFIER_FAILED = "verifier_failed"


class Refused(Exception):
    """Raised when a message breaks a rule. `reason` is counted; `detail` is one line for the sender."""

    def __init__(self, reason: RefusalReason, detail: str = "") -> None:
        detail = one_line(detail)
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail

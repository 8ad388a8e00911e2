"""Why something from a peer was refused: the closed list of reasons that are counted, shown and sent back."""

from enum import StrEnum


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
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail

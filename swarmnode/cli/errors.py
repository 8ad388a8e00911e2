"""Which exceptions are a person's to mend: they become one line that says what, where and what to do."""

from peers.base import TransportError
from protocol.identity import IdentityError
from protocol.invite import InviteError
from swarmnode.config import ConfigError
from swarmnode.data_directory import DataError
from swarmnode.models import ModelNotFound
from swarmnode.store import StoreError


class UserError(Exception):
    """Something to be mended by the person at the terminal."""


def as_user_error(error: BaseException) -> UserError | None:
    """The one-line form of an error that a person can mend; None for a fault of this program."""
    if isinstance(error, BaseExceptionGroup):
        known = [as_user_error(inner) for inner in error.exceptions]
        return known[0] if all(known) else None
    if isinstance(error, UserError):
        return error
    from swarmnode.api.server import ApiError
    from swarmnode.runtime.node import NodeFailed

    mendable = (
        ApiError,
        NodeFailed,
        ConfigError,
        DataError,
        InviteError,
        IdentityError,
        ModelNotFound,
        StoreError,
        TransportError,
    )
    if isinstance(error, mendable):
        return UserError(" ".join(str(error).split()))
    return None

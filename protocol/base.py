"""The base of every message: frozen, strict, no unknown fields, one encoding."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol import limits
from protocol.encoding import decode, encode
from protocol.refusals import RefusalReason, Refused

Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Key = Annotated[bytes, Field(min_length=32, max_length=32)]
Name = Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_CHARS)]
Address = Annotated[str, Field(min_length=1, max_length=limits.MAX_ADDRESS_CHARS)]
Version = Annotated[int, Field(ge=0, le=limits.MAX_VERSION)]
Counter = Annotated[int, Field(ge=0, le=limits.MAX_COUNTER)]
Rate = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Message(BaseModel):
    """A value that travels. `encode` and `decode` are exact inverses."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def encode(self) -> bytes:
        """Deterministic msgpack of the fields."""
        return encode(self.model_dump(mode="python"))

    @classmethod
    def decode(cls, data: bytes, max_bytes: int = limits.MAX_ENVELOPE_BYTES) -> Self:
        """The message of `data`. Raises `Refused` (oversized, malformed)."""
        return cls.from_plain(decode(data, max_bytes))

    @classmethod
    def from_plain(cls, value: Any) -> Self:
        """The message of an already decoded map. Raises `Refused(malformed)` naming the first bad field."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or cls.__name__
            raise Refused(RefusalReason.MALFORMED, f"{cls.__name__}.{where}: {first['msg']}") from error

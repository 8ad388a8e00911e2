"""The base of every message: frozen, strict, no unknown fields, one encoding."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from protocol import limits
from protocol.encoding import decode, encode
from protocol.refusals import HIDDEN_CHARS, MAX_DETAIL_CHARS, RefusalReason, Refused, one_line

_PRINTABLE = f"^[^{HIDDEN_CHARS}]*$"

Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Key = Annotated[bytes, Field(min_length=32, max_length=32)]
Name = Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_CHARS, pattern=_PRINTABLE)]
Address = Annotated[str, Field(min_length=1, max_length=limits.MAX_ADDRESS_CHARS, pattern=_PRINTABLE)]
ShortText = Annotated[
    str,
    BeforeValidator(lambda text: one_line(text) if isinstance(text, str) else text),
    Field(max_length=MAX_DETAIL_CHARS),
]
"""One line for people. Made fit to print when it is set; what arrives unfit is refused, as it is not its own
encoding."""
Version = Annotated[int, Field(ge=0, le=limits.MAX_VERSION)]
Counter = Annotated[int, Field(ge=0, le=limits.MAX_COUNTER)]
Rate = Annotated[float, Field(ge=0, le=limits.MAX_MAGNITUDE, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-limits.MAX_MAGNITUDE, le=limits.MAX_MAGNITUDE, allow_inf_nan=False)]


class Message(BaseModel):
    """A value that travels. `encode` and `decode` are exact inverses."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_values: ClassVar[int] = 4_096
    """Values that its encoding may hold (see `protocol.encoding.decode`)."""

    def encode(self) -> bytes:
        """Deterministic msgpack of the fields."""
        return encode(self.model_dump(mode="python"))

    @classmethod
    def decode(cls, data: bytes, max_bytes: int = limits.MAX_ENVELOPE_BYTES) -> Self:
        """The message of `data`. Raises `Refused` (oversized, malformed)."""
        message = cls.from_plain(decode(data, max_bytes, cls.max_values))
        if message.encode() != data:
            # A field left out, or an integer for a float: the same message would have a second hash.
            raise Refused(
                RefusalReason.MALFORMED, f"{cls.__name__}: not every field is there in its own type"
            )
        return message

    @classmethod
    def from_plain(cls, value: Any) -> Self:
        """The message of an already decoded map. Raises `Refused(malformed)` naming the first bad field."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(one_line(str(part), 64) for part in first["loc"][:8])
            where = f"{cls.__name__}.{where}" if where else cls.__name__
            what = first["msg"].removeprefix("Value error, ")
            raise Refused(RefusalReason.MALFORMED, f"{where}: {what}") from error

    @model_validator(mode="before")
    @classmethod
    def _few_enough_fields(cls, value: Any) -> Any:
        # Pydantic would report every unknown field, which costs far more than the bytes that named it.
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            raise ValueError(f"{len(value)} fields, {cls.__name__} has {len(cls.model_fields)}")
        return value

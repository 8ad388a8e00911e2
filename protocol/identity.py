"""A node's Ed25519 identity: a standard PKCS#8 PEM file, and a public key that names the node on the wire."""

import hashlib
from typing import NewType

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

NodeKey = NewType("NodeKey", bytes)
"""Raw 32-byte Ed25519 public key."""

_FIRST_WORDS = (
    "amber brave calm deft eager fair glad hardy icy jolly keen lucid merry noble olive proud quick "
    "rapid sunny tidy urban vivid warm young zesty ample bold crisp dusky early fresh"
)
_SECOND_WORDS = (
    "adder bison crane dingo egret finch gecko heron ibis jackal koala lemur marten newt otter panda "
    "quail raven seal tapir urchin vole wren yak zebra alpaca badger cobra dove eagle ferret"
)
_FIRST, _SECOND = _FIRST_WORDS.split(), _SECOND_WORDS.split()


class IdentityError(ValueError):
    """A key that cannot be used; the message says what to do."""


class Identity:
    """A private key and the name that follows from it."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        raw = private_key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        self.key = NodeKey(raw)
        self.name = node_name(self.key)

    @classmethod
    def generate(cls) -> "Identity":
        """A new random identity."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> "Identity":
        """The identity of a 32-byte private seed (RFC 8032). Raises `IdentityError` for another length."""
        if len(seed) != 32:
            raise IdentityError(f"an Ed25519 seed has 32 bytes, not {len(seed)}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def from_pem(cls, pem: bytes) -> "Identity":
        """Read an unencrypted PKCS#8 PEM. Raises `IdentityError` for anything but an Ed25519 private key."""
        try:
            private_key = serialization.load_pem_private_key(pem, password=None)
        except TypeError as error:
            raise IdentityError(
                "the key is encrypted with a passphrase; remove it with 'openssl pkey -in FILE -out NEW'"
            ) from error
        except (ValueError, UnsupportedAlgorithm) as error:
            raise IdentityError(
                "not a private key that can be used; expected Ed25519 as PKCS#8 PEM ('BEGIN PRIVATE KEY'); "
                "make one with 'swarmnode init' or 'openssl genpkey -algorithm ed25519'"
            ) from error
        if not isinstance(private_key, Ed25519PrivateKey):
            kind = type(private_key).__name__
            raise IdentityError(
                f"the key is {kind}, expected Ed25519; make one with 'swarmnode init' "
                "or 'openssl genpkey -algorithm ed25519'"
            )
        return cls(private_key)

    def to_pem(self) -> bytes:
        """The private key as unencrypted PKCS#8 PEM."""
        return self._private_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def private_seed(self) -> bytes:
        """The 32-byte private seed, for handing the key to a transport."""
        return self._private_key.private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )

    def sign(self, message: bytes) -> bytes:
        """A 64-byte Ed25519 signature."""
        return self._private_key.sign(message)


def verify(key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is `key`'s Ed25519 signature of `message`; False for malformed keys too."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def node_name(key: bytes) -> str:
    """A name for people, such as `keen-otter-3f9a`: two words and four hex digits of the key's hash."""
    digest = hashlib.sha256(b"swarmnode name\0" + key).digest()
    first, second = _FIRST[digest[0] % len(_FIRST)], _SECOND[digest[1] % len(_SECOND)]
    return f"{first}-{second}-{digest[2:4].hex()}"

"""Keys: the standard file format, readable refusals of every other, and names that never change."""

import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa, x25519
from hypothesis import given
from hypothesis import strategies as st

from protocol.identity import Identity, IdentityError, node_name, verify

RFC8032_SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
RFC8032_KEY = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
RFC8032_SIGNATURE = (
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
    "d25bf5f0595bbe24655141438e7a100b"
)


def private_pem(key: object, encryption: serialization.KeySerializationEncryption | None = None) -> bytes:
    return key.private_bytes(  # type: ignore[attr-defined, no-any-return]
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        encryption or serialization.NoEncryption(),
    )


def test_the_first_test_vector_of_rfc_8032() -> None:
    identity = Identity.from_seed(RFC8032_SEED)
    assert identity.key.hex() == RFC8032_KEY
    assert identity.sign(b"").hex() == RFC8032_SIGNATURE
    assert verify(identity.key, b"", bytes.fromhex(RFC8032_SIGNATURE))


def test_pem_round_trip() -> None:
    identity = Identity.generate()
    again = Identity.from_pem(identity.to_pem())
    assert (again.key, again.name) == (identity.key, identity.name)
    assert again.private_seed() == identity.private_seed()
    assert Identity.from_seed(identity.private_seed()).key == identity.key


def test_a_key_made_by_openssl_is_accepted_and_written_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", path], check=True, timeout=30)
    pem = path.read_bytes()
    identity = Identity.from_pem(pem)
    assert identity.to_pem() == pem
    shown = subprocess.run(
        ["openssl", "pkey", "-in", path, "-pubout", "-outform", "DER"],
        check=True,
        timeout=30,
        capture_output=True,
    )
    assert shown.stdout[-32:] == identity.key


@pytest.mark.parametrize(
    ("pem", "expected"),
    [
        (private_pem(rsa.generate_private_key(65537, 2048)), "RSA"),
        (private_pem(ec.generate_private_key(ec.SECP256R1())), "PrivateKey, expected Ed25519"),
        (private_pem(x25519.X25519PrivateKey.generate()), "X25519"),
        (b"", "PKCS#8"),
        (b"garbage", "PKCS#8"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "PKCS#8"),
        (Identity.from_seed(RFC8032_SEED).to_pem()[:-40], "PKCS#8"),
        (bytes(range(256)), "PKCS#8"),
    ],
    ids=["rsa", "ec", "x25519", "empty", "garbage", "not-a-key", "cut", "binary"],
)
def test_other_files_are_refused_with_one_line_that_says_what_to_do(pem: bytes, expected: str) -> None:
    with pytest.raises(IdentityError) as caught:
        Identity.from_pem(pem)
    message = str(caught.value)
    assert expected in message
    assert "openssl genpkey -algorithm ed25519" in message
    assert "\n" not in message


def test_an_encrypted_key_is_refused_and_the_message_tells_how_to_decrypt_it() -> None:
    private_key = Identity.generate()._private_key
    pem = private_pem(private_key, serialization.BestAvailableEncryption(b"secret"))
    with pytest.raises(IdentityError, match=r"passphrase.*openssl pkey"):
        Identity.from_pem(pem)


def test_an_openssh_key_of_the_right_kind_is_the_same_identity() -> None:
    identity = Identity.generate()
    pem = identity._private_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    try:
        assert Identity.from_pem(pem).key == identity.key
    except IdentityError as error:
        assert "PKCS#8" in str(error)


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_seed_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(IdentityError, match="32 bytes"):
        Identity.from_seed(bytes(length))


def test_names_are_stable() -> None:
    assert node_name(bytes.fromhex(RFC8032_KEY)) == "warm-badger-2276"
    assert Identity.from_seed(RFC8032_SEED).name == "warm-badger-2276"


@given(st.binary(min_size=32, max_size=32))
def test_a_name_is_two_words_and_four_hex_digits(key: bytes) -> None:
    first, second, digits = node_name(key).split("-")
    assert first.isalpha() and second.isalpha()
    assert len(bytes.fromhex(digits)) == 2


@given(st.binary(max_size=80), st.binary(max_size=40), st.binary(max_size=80))
def test_verify_is_false_and_never_fails_on_arbitrary_bytes(
    key: bytes, message: bytes, signature: bytes
) -> None:
    assert verify(key, message, signature) is False


def test_a_signature_is_of_one_message_and_one_key() -> None:
    one, other = Identity.generate(), Identity.generate()
    signature = one.sign(b"message")
    assert verify(one.key, b"message", signature)
    assert not verify(one.key, b"messagf", signature)
    assert not verify(other.key, b"message", signature)
    assert not verify(one.key, b"message", signature[:-1])
    # The other encoding of the same signature (S + group order) must not pass: it would be a second envelope.
    order = 2**252 + 27742317777372353535851937790883648493
    scalar = int.from_bytes(signature[32:], "little") + order
    assert not verify(one.key, b"message", signature[:32] + scalar.to_bytes(32, "little"))

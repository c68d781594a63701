"""Keys, sealed boxes, secret shares and masks: Flower's primitives, except for the masks.

Flower's `pseudo_rand_gen` folds a 32-byte seed into 32 bits and draws from a Mersenne Twister, without the largest
number of the range. 2^32 seeds can be tried one by one, and numbers that are not uniform leak what they hide. So masks
are the key stream of AES-256 in counter mode here. Flower's quantization draws from NumPy's global generator, which is
not reproducible; `fixed_point` replaces it.

`client` and this module import flwr. Nothing imports them before a run uses secure aggregation.
"""

import base64
import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key

from fedpara.errors import WireError
from fedpara.secure.fixed_point import Ring, unpacked

SECRET = 31
"""Bytes of a secret. Shamir's shares hold 16 bytes each, and Flower pads by at least one byte, so 31 bytes take two."""
PUBLIC = 33
"""Bytes of a public key: a compressed point of P-256."""
SHARE = 36
"""Bytes of a share of a secret: its number, and two blocks."""
COMMITMENT = 32

_CURVE = ec.SECP256R1()


def fresh_secret() -> bytes:
    """A secret from the operating system's randomness."""
    return secrets.token_bytes(SECRET)


def seeded_secret(*parts: object) -> bytes:
    """For simulations: the same secret for the same parts. Whoever knows the parts can remove the masks."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=SECRET).digest()


def commitment(secret: bytes) -> bytes:
    return hashlib.sha256(b"fedpara secagg" + secret).digest()


def private_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(secret, "big") + 1, _CURVE)


def public_key(secret: bytes) -> bytes:
    key = private_key(secret).public_key()
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def agreed_key(secret: bytes, public: bytes) -> bytes:
    """The key that two clients share, from either client's secret and the other client's public key."""
    if (point := _point(public)) is None:
        raise WireError("a public key is not a point of the curve P-256.")
    return generate_shared_key(private_key(secret), point)


def is_public_key(public: bytes) -> bool:
    return _point(public) is not None


def _point(public: bytes) -> ec.EllipticCurvePublicKey | None:
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, public)
    except ValueError:
        return None


def seal(key: bytes, text: bytes) -> bytes:
    return encrypt(key, text)


def unseal(key: bytes, box: bytes) -> bytes:
    try:
        return decrypt(key, box)
    except InvalidToken:
        raise WireError(
            "a sealed share cannot be opened: it is damaged, or sealed for another client."
        ) from None


def split_secret(secret: bytes, needed: int, count: int) -> list[bytes]:
    """`count` shares, any `needed` of which restore the secret."""
    return create_shares(secret, needed, count)


def join_shares(shares: Sequence[bytes]) -> bytes:
    """The secret. WireError if the shares do not belong together."""
    try:
        return combine_shares(list(shares))
    except (ValueError, IndexError, ZeroDivisionError):
        raise WireError("shares of a secret do not fit together.") from None


def self_mask(secret: bytes, length: int, width: int) -> Ring:
    return mask(hashlib.sha256(b"self mask" + secret).digest(), length, width)


def pair_mask(key: bytes, length: int, width: int) -> Ring:
    """The mask of an agreed key."""
    return mask(base64.urlsafe_b64decode(key), length, width)


def mask(key: bytes, length: int, width: int) -> Ring:
    """`length` uniform numbers modulo 2^(8 width). A key makes one mask: every round has new keys."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return unpacked(np.frombuffer(stream.update(bytes(length * width)), np.uint8), width)

"""Keys with which the processes of a run authenticate each other.

Invariant: each attempt (each start of the driver) has keys of its own. Both ends of a connection present the same
certificate and accept no other. So a client sends nothing to a server without the key, and reads nothing from it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

from ...files import private
from .cluster_join import LOOPBACK

_FILE = "ray.pem"


def new_key() -> bytes:
    """Make a private key and its certificate; return both as one PEM text.

    The certificate names the loopback address, because Ray's processes compare the address of a server with its
    certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "msrl-run")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address(LOOPBACK))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        # Valid for the whole run, whatever the clocks of the hosts show.
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(serialization.Encoding.PEM, *form)


def make_ray_key(folder: Path) -> dict[str, str]:
    """Make a key for Ray's processes on this machine; return environment variables.

    The key is a file in `folder`, which must be private. With these variables, Ray's processes use TLS with this key,
    and each end of a connection must present the certificate.
    """
    path = folder / _FILE
    private.write(path, new_key())
    files = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    return {"RAY_USE_TLS": "1", **dict.fromkeys(files, str(path))}


__all__ = ["make_ray_key", "new_key"]

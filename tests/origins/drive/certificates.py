"""Private keys and self-signed certificates for tests."""

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID


def private_key():
    """Return a new key, and its PEM."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.PKCS8
    return key, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()


def certify(path, *hosts):
    """Write key and self-signed certificate of a server with these names."""
    key, pem = private_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
        .add_extension(x509.SubjectAlternativeName(map(x509.DNSName, hosts)), critical=False)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(pem.encode() + certificate.public_bytes(serialization.Encoding.PEM))

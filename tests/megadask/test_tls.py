"""TLS from end to end: who has no certificate of the cluster's authority is refused."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster, Security

import megadask as md
from tests.megadask.helpers.ranks import Ranks
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import drain, every_token, tokens_delivered

pytest.importorskip("cryptography", reason="needs the extra test")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

pytestmark = pytest.mark.timeout(120)


class Authority:
    """Signs certificates for the loopback device, and writes them to a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        own = self._builder(self._name, self._key).add_extension(constraints, critical=True)
        self._write("ca.pem", own.sign(self._key, hashes.SHA256()))

    def security(self) -> Security:
        """Return what everybody on the cluster holds: a certificate, its key, the authority's."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
        certificate = self._builder(subject, key).sign(self._key, hashes.SHA256())
        self._write("own.pem", certificate)
        (self._folder / "own.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        own, private, ca = (str(self._folder / n) for n in ("own.pem", "own.key", "ca.pem"))
        files = {"tls_ca_file": ca}
        for role in ("client", "scheduler", "worker"):
            files |= {f"tls_{role}_cert": own, f"tls_{role}_key": private}
        return Security(require_encryption=True, **files)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    def _write(self, name: str, certificate: x509.Certificate) -> None:
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        (self._folder / name).write_bytes(pem)


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    return Authority(tmp_path_factory.mktemp("tls"), "ours").security()


@pytest.fixture(scope="module")
def service(security: Security) -> Iterator[md.Service]:
    """A service on a cluster that takes TLS alone: workers are processes of their own."""
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            protocol="tls",
            security=security,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            memory_limit=None,
            silence_logs=50,
        ) as cluster,
        Client(cluster, security=security, set_as_default=False) as client,
        md.serve(make(epochs=1, shadows=1), client, name="tls") as served,
    ):
        yield served


def test_a_run_over_tls(service: md.Service, security: Security) -> None:
    assert service.address.startswith("tls://127.0.0.1:")
    stats = service.stats()
    held = [one["worker"] for one in (*stats["loaders"], *stats["constructors"])]
    assert held
    assert all(address.startswith("tls://127.0.0.1:") for address in held)

    def body(rank: int) -> list[object]:
        with md.connect(service.address, "tls", rank=rank, security=security) as loader:
            return drain(loader)  # type: ignore[return-value]

    seen = Ranks([lambda rank=rank: body(rank) for rank in range(2)]).results()
    rows = [row for rows in DATA.values() for row in rows]
    assert tokens_delivered(seen) == every_token(rows)
    assert service.audit()["ok"]


def test_who_has_no_certificate_is_refused(service: md.Service) -> None:
    with pytest.raises(md.errors.ConfigError, match=r"no certificate.*tls_ca_file"):
        md.connect(service.address, "tls", rank=0, timeout=3)
    plain = service.address.replace("tls://", "tcp://")
    with pytest.raises(md.errors.DeadlineError, match="does not answer"):
        md.connect(plain, "tls", rank=0, timeout=3)


def test_a_certificate_of_another_authority_is_refused(service: md.Service, tmp_path: Path) -> None:
    others = Authority(tmp_path, "theirs").security()
    with pytest.raises(md.errors.DeadlineError, match="does not answer"):
        md.connect(service.address, "tls", rank=0, timeout=3, security=others)
    assert service.stats()["trainers"] == {}

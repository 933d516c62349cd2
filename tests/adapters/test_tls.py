"""Certificates that can be used, and words for those that cannot."""

import ssl
import subprocess

import pytest

from kvroute.adapters.tls import client_tls, server_tls
from kvroute.errors import ConfigError
from tests.certificates import make_certificates


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"))


def handshake(client, server, name="127.0.0.1"):
    """Let two contexts agree in memory; raises what either side raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ours.version()


def test_an_authority_of_ones_own(files):
    """What it signed is believed, under the names that it signed for."""
    server = server_tls(str(files.certificate), str(files.key))
    assert handshake(client_tls(str(files.authority)), server).startswith("TLSv1")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(client_tls(str(files.authority)), server, name="elsewhere.example")


def test_the_systems_authorities_do_not_know_it(files):
    """Verification is on unless it is switched off, and then everything is believed."""
    server = server_tls(str(files.certificate), str(files.key))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client_tls(True), server)
    assert handshake(client_tls(False), server, name="elsewhere.example")


def test_certificate_and_key_in_one_file(files, tmp_path):
    """As some tools write them."""
    both = tmp_path / "both.pem"
    both.write_bytes(files.certificate.read_bytes() + files.key.read_bytes())
    assert handshake(client_tls(str(files.authority)), server_tls(str(both), None))


def test_a_key_with_a_password_is_refused_without_asking(files, tmp_path):
    """Nobody sits at a service's terminal."""
    locked = tmp_path / "locked.pem"
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", str(files.key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="unencrypted"):
        server_tls(str(files.certificate), str(locked))


@pytest.mark.parametrize("name", ["absent.pem", "text.pem"])
def test_files_that_are_none(files, tmp_path, name):
    """The setting and the file are named."""
    path = tmp_path / name
    if name == "text.pem":
        path.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"proxy\.tls_ca.*" + name):
        client_tls(str(path))
    with pytest.raises(ConfigError, match=r"proxy\.tls_certificate.*" + name):
        server_tls(str(path), str(files.key))


def test_a_key_of_another_certificate(files, tmp_path):
    """The two must belong together."""
    other = make_certificates(tmp_path)
    with pytest.raises(ConfigError, match=r"proxy\.tls_certificate"):
        server_tls(str(files.certificate), str(other.key))

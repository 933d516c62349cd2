"""rediss:// on a real server behind real TLS, with an authority that only the URL names."""

import pytest

from kvroute.adapters.doctor_store import examine_store
from kvroute.adapters.store import open_store
from tests import redis_servers
from tests.certificates import make_certificates, terminated


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"))


async def test_a_store_works_over_tls(files):
    """The whole store comes up on it: index, ledger and account."""
    port = redis_servers.free_port()
    with redis_servers.server(port=port) as server, server.client() as client:
        async with terminated(port, files.server()) as tls_port:
            store = await open_store(f"rediss://127.0.0.1:{tls_port}?ssl_ca_certs={files.authority}")
            try:
                assert store.link.is_up
                await redis_servers.until(lambda: client.dbsize() > 0)
            finally:
                await store.close()


@pytest.mark.parametrize(
    ("options", "trouble"),
    [("?ssl_ca_certs={}", False), ("?ssl_cert_reqs=none", False), ("", True)],
)
async def test_whom_it_believes(files, options, trouble):
    """The named authority or none at all; a certificate that nobody vouches for is trouble, in words."""
    port = redis_servers.free_port()
    with redis_servers.server(port=port):
        async with terminated(port, files.server()) as tls_port:
            url = f"rediss://127.0.0.1:{tls_port}{options.format(files.authority)}"
            facts = await examine_store(url, 0.005)
    assert ("certificate" in facts.trouble.lower()) is trouble
    assert (facts.policy == "noeviction") is not trouble


async def test_plain_on_a_tls_port_is_no_hang(files):
    """redis:// where rediss:// is spoken ends, with trouble."""
    port = redis_servers.free_port()
    with redis_servers.server(port=port):
        async with terminated(port, files.server()) as tls_port:
            assert (await examine_store(f"redis://127.0.0.1:{tls_port}", 0.005)).trouble

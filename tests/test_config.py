"""Settings: what is accepted, what is refused and with which words."""

from pathlib import Path

import pytest

from kvroute.config import Config, dump, load
from kvroute.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "config" / "kvroute.yaml"


def write(tmp_path, text):
    path = tmp_path / "kvroute.yaml"
    path.write_text(text)
    return path


def test_defaults():
    """Without a file, a variable or a flag the defaults hold."""
    assert load(None, env={}) == Config()


def test_shipped_file_is_the_defaults():
    """The commented file shows the defaults: loading it as shipped changes nothing but the replicas that it names."""
    shipped = load(SHIPPED, env={})
    assert [replica.url for replica in shipped.replicas] == ["http://127.0.0.1:8100", "http://127.0.0.1:8101"]
    assert load(SHIPPED, env={}, overrides={"replicas": []}) == Config()


def test_shipped_file_explains_every_setting():
    """Every key of every section stands in the commented file."""
    text = SHIPPED.read_text()
    keys = [line.split(":")[0].strip() for line in dump(Config()).splitlines()]
    assert [key for key in keys if f"{key}:" not in text] == []


def test_every_example_loads():
    """The examples are valid settings."""
    for path in sorted((SHIPPED.parent / "examples").glob("*.yaml")):
        assert load(path, env={}).replicas, path.name


def test_file_then_environment_then_flags(tmp_path):
    """A flag beats the environment, which beats the file."""
    path = write(tmp_path, "listen: {port: 1}\nrouting: {policy: random}\nadmin: {port: 7}\n")
    env = {"KVROUTE_LISTEN__PORT": "2", "KVROUTE_ADMIN__PORT": "3", "KVROUTE_CACHE": "x", "OTHER__PORT": "9"}
    assert load(None, env={"KVROUTE_TOKENIZER": "none"}).tokenizer == "none"
    assert load(None, env={"KVROUTE_TENANTS__KEYS__MyTeam": "k"}).tenants.keys == {"MyTeam": "k"}
    config = load(path, env=env, overrides={"listen.port": 4})
    assert (config.listen.port, config.admin.port, config.routing.policy) == (4, 3, "random")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("listn: {port: 1}", ["top level", "listn", "listen", "replicas"]),
        ("routing: {polcy: random}", ["routing", "polcy", "policy", "ttft_weight"]),
        ("routing: {policy: fastest}", ["routing.policy", "fastest", "round-robin", "kvroute"]),
        ("listen: {port: 70000}", ["listen.port", "65535"]),
        ("listen: {port: abc}", ["listen.port", "int"]),
        ("replicas: [{url: 'ftp://a'}]", ["replicas[0]", "ftp://a", "http://"]),
        ("replicas: [{url: 'http://'}]", ["replicas[0]", "no host"]),
        ("replicas: [{url: 'http://a:99999'}]", ["replicas[0]", "port"]),
        ("replicas: [{urls: 'http://a'}]", ["urls", "api_key, url"]),
        ("replicas: http://a", ["replicas", "array"]),
        ("store: {url: 'http://a'}", ["store", "redis://"]),
        ("store: {url: 'unix://'}", ["store", "socket"]),
        ("store: {deployment: 'a b'}", ["store.deployment"]),
        ("- a", ["mapping"]),
        ("a: [", ["YAML"]),
        ("proxy: {idle_timeout_s: 0}", ["proxy.idle_timeout_s"]),
        ("tenants: {keys: {a: ''}}", ["tenants", "'a'", "not empty"]),
        ("tenants: {keys: {a: x, b: x}}", ["tenants", "same key"]),
        ("tenants: {class_of: {a: gold}}", ["tenants", "'gold'", "none is defined"]),
        ("tenants: {classes: {x: 1}, keys: {a: k}, class_of: {b: x}}", ["tenants", "'b'", "no key"]),
        ("tenants: {class_header: x-class}", ["tenants", "class_header", "classes is empty"]),
        ("tenants: {classes: {x: 5000}}", ["tenants.classes", "1000"]),
        ("routing: {shadow: [fastest]}", ["routing.shadow", "fastest", "round-robin"]),
        ("routing: {shadow: [random, random, random, random, random]}", ["routing.shadow", "4"]),
        ("replicas: [{url: 'http://a', api_key: 'ключ'}]", ["replicas[0]", "api_key", "ASCII"]),
        ("replicas: [{url: 'http://a', api_key: \"x\\r\\ny\"}]", ["replicas[0]", "api_key"]),
        ("replicas: [{url: 'http://a b:1'}]", ["replicas[0]", "scheme, host, port"]),
        ("replicas: [{url: 'http://u:p@a:1/x?y'}]", ["replicas[0]", "api_key"]),
        ("replicas: [http://a:1]", ["replicas[0]", "- url: http://HOST:PORT"]),
        ("replicas: [{url: 'http://a:1/v1'}]", ["replicas[0]", "'http://a:1/v1'", "without it"]),
        ("replicas: [{url: 'http://a:1'}, {url: 'http://A:1/'}]", ["`replicas`", "twice", "http://a:1", "http://A:1/"]),
        ("replicas: [{url: 'https://a'}, {url: 'https://a:443'}]", ["`replicas`", "twice"]),
        ("listen: {port: 9}\nadmin: {port: 9}", ["`admin.port`", "`listen.port`", "both 9"]),
        ("listen: {port: 9, host: 0.0.0.0}\nadmin: {port: 9}", ["`admin.port`", "both 9"]),
        ("a: 1\nb: [", ["line 2, column 5", "YAML", "stream end"]),
        ("a: \x01", ["YAML"]),
        ("proxy: {tls_ca: ca.pem, tls_verify: false}", ["`proxy`", "tls_ca"]),
        ("proxy: {tls_key: key.pem}", ["`proxy`", "tls_certificate"]),
        ("[" * 3000, ["nested too deeply"]),
    ],
)
def test_refused(tmp_path, text, words):
    """A wrong setting is refused with its path, the fault and the valid choices."""
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text), env={})
    assert [word for word in words if word not in str(caught.value)] == []


def test_servers_that_share_a_host_are_several():
    """Other ports, schemes or paths are other servers, and two listeners may both take any free port."""
    urls = ["http://a:1", "http://a:2", "https://a:1", "http://a:1/x"]
    overrides = {"replicas": [{"url": url} for url in urls], "listen.port": 0, "admin.port": 0}
    assert [replica.url for replica in load(None, env={}, overrides=overrides).replicas] == urls


def test_missing_file(tmp_path):
    """A file that is not there is named."""
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load(tmp_path / "nowhere.yaml", env={})


def test_not_text(tmp_path):
    """A binary file is refused as such."""
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path, env={})


def test_environment_cannot_replace_a_scalar_by_a_section(tmp_path):
    """A variable that reaches into a setting which is no section is refused by name."""
    with pytest.raises(ConfigError, match="tokenizer"):
        load(write(tmp_path, "tokenizer: auto"), env={"KVROUTE_TOKENIZER__DIR": "x"})


def test_dump_hides_secrets():
    """Keys and passwords are not printed."""
    config = load(
        None,
        env={},
        overrides={
            "replicas": [{"url": "http://a", "api_key": "s3cret"}],
            "tenants.keys": {"team": "t0ken"},
            "store.url": "redis://user:pa55@host:6379/0",
        },
    )
    text = dump(config)
    assert "s3cret" not in text
    assert "t0ken" not in text
    assert "pa55" not in text
    assert "team" in text

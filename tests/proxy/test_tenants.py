"""Whose request it is, and who may ask."""

from __future__ import annotations

import pytest

from kvroute.errors import BadRequest
from kvroute.proxy.tenants import Tenants

KEYS = Tenants({"team-a": "sk-1", "team-b": "sk-2"})


def test_default():
    """Without keys and header everybody is the default tenant, whatever they send."""
    assert Tenants().tenant([(b"Authorization", b"Bearer sk-1")]) == "default"


@pytest.mark.parametrize(
    ("header", "tenant"),
    [
        ((b"Authorization", b"Bearer sk-1"), "team-a"),
        ((b"authorization", b"bearer  sk-2 "), "team-b"),
        ((b"X-Api-Key", b"sk-2"), "team-b"),
    ],
)
def test_keys(header: tuple[bytes, bytes], tenant: str):
    """The key's name is the tenant; both ways of sending a key are taken."""
    assert KEYS.tenant([header]) == tenant


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"Authorization", b"Bearer sk-3")],
        [(b"Authorization", b"Basic sk-1")],
        [(b"Authorization", b"sk-1")],
        [(b"Authorization", b"Bearer ")],
        [(b"Authorization", b"Bearer nope"), (b"X-Api-Key", b"sk-1")],
    ],
)
def test_wrong_keys(headers: list[tuple[bytes, bytes]]):
    """Without a valid key a request is refused with 401."""
    with pytest.raises(BadRequest, match="Authorization: Bearer") as caught:
        KEYS.tenant(headers)
    assert caught.value.status == 401


@pytest.mark.parametrize(
    ("value", "tenant"), [(b"acme", "acme"), (b"a b", "default"), (b"x" * 65, "default"), (b"\xff", "default")]
)
def test_header(value: bytes, tenant: str):
    """A configured header names the tenant, where it is fit to be a label."""
    assert Tenants(header="X-Team").tenant([(b"x-team", value)]) == tenant


CLASSES = {"gold": 10, "batch": -10}


@pytest.mark.parametrize(
    ("tenants", "tenant", "named", "priority"),
    [
        (Tenants(), "a", b"gold", 0),
        (Tenants(classes=CLASSES, class_of={"a": "gold"}), "a", b"batch", 10),  # no header is configured
        (Tenants(classes=CLASSES, class_of={"a": "gold"}), "b", None, 0),
        (Tenants(classes=CLASSES, class_header="X-Class"), "a", b" gold ", 10),
        (Tenants(classes=CLASSES, class_header="X-Class"), "a", b"silver", 0),
        (Tenants({"a": "k"}, classes=CLASSES, class_header="X-Class"), "a", b"gold", 0),
        (Tenants({"a": "k"}, classes=CLASSES, class_header="X-Class"), "a", b"batch", -10),
        (Tenants({"a": "k"}, classes=CLASSES, class_of={"a": "gold"}, class_header="X-Class"), "a", b"batch", -10),
        (Tenants({"a": "k"}, classes=CLASSES, class_of={"a": "gold"}, class_header="X-Class"), "a", None, 10),
    ],
)
def test_priority(tenants: Tenants, tenant: str, named: bytes | None, priority: int):
    """A tenant's class gives its requests their priority; the header names another one, with keys only a lower one."""
    headers = [] if named is None else [(b"x-class", named)]
    assert tenants.priority(tenant, headers) == priority

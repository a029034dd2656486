"""The salt chain: what keeps the KV of equal tokens apart."""

from __future__ import annotations

from os.path import commonprefix

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.utils.salt_chain import (
    FIRST_CONTENT_ID,
    TOKEN_MASK,
    Namespace,
    content_ids,
    event_seed,
    lineage_salt,
    tenant_of,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

tenants = st.none() | st.builds(lambda key: tenant_of(key=key), st.text(min_size=1))
adapters = st.none() | st.text("ab:+@/é ", min_size=1, max_size=5)
revisions = st.text("0123456789abcdef", min_size=4, max_size=4)


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    adapter = draw(adapters)
    return Namespace(draw(tenants), adapter, draw(revisions) if adapter else "")


@given(first=namespaces(), second=namespaces())
def test_a_name_holds_its_parts(first: Namespace, second: Namespace) -> None:
    """Other parts have other names, salts and seeds, and a difference says which."""
    assert Namespace.of(first.name) == first
    is_same = first == second
    for derived in (lambda name: name, lineage_salt, event_seed):
        assert (derived(first.name) == derived(second.name)) is is_same
    assert bool(first.difference(second)) is not is_same


def test_what_everybody_shares_has_no_salt() -> None:
    assert Namespace().name is None
    assert lineage_salt(None) == 0 and event_seed(None) == b""


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (Namespace("0123456789"), "tenant 01234567, not none"),
        (Namespace(None, "fr", "aa"), "adapter fr, not none"),
        (Namespace("t", "fr", "aa"), "tenant t, not none; adapter fr, not none"),
    ],
)
def test_a_difference_names_the_parts(parts: Namespace, said: str) -> None:
    assert parts.difference(Namespace()) == said


def test_revisions_of_one_adapter_differ() -> None:
    old, new = Namespace(None, "fr", "aa"), Namespace(None, "fr", "bb")
    assert old.difference(new) == "revision aa of adapter fr, not bb"


rows = st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=6)


@given(first=rows, second=rows)
def test_content_ids_are_equal_as_far_as_the_contents(
    first: list[bytes], second: list[bytes]
) -> None:
    ids = [content_ids(b"".join(each), len(each)) for each in (first, second)]
    assert [len(each) for each in ids] == [len(first), len(second)]
    common = len(commonprefix([first, second]))  # type: ignore[type-var]
    for mask in (-1, TOKEN_MASK):
        a, b = ([word & mask for word in each] for each in ids)
        assert a[:common] == b[:common]
        assert not set(a[common:]) & set(b[common:])
        assert all(FIRST_CONTENT_ID <= word < 1 << 63 for word in a + b)
    assert all(word & 0xFFFF_FFFF == word & TOKEN_MASK for word in ids[0])


@pytest.mark.parametrize(("data", "count"), [(b"", 0), (b"1234", 3), (b"12", -1)])
def test_rows_of_unequal_size_have_no_ids(data: bytes, count: int) -> None:
    with pytest.raises(ValueError, match="not .* embeddings of equal size"):
        content_ids(data, count)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

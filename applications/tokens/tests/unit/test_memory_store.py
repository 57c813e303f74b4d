from __future__ import annotations

import gc

from genie_tokens.store import Resync
from genie_tokens.stores.memory import MAX_STALE_TOKENS, PAGE, MemoryTokenStore
from genie_tokens.token import Wallet
from tokens_made import ids, token

OWN, GROUP = Wallet("Fiat", "GBP", "alice", None), Wallet("Fiat", "GBP", None, "acme")


async def test_spent_tokens_are_removed_from_their_wallets() -> None:
    """Else a wallet that much passes through would be walked past all that it ever had."""
    store = MemoryTokenStore()
    await store.add([token(f"{number}", account="acme") for number in range(100)])
    for number in range(2_000):
        change = token(f"{number + 100}", account="acme")
        await store.spend([token(f"{number}")], transaction="T", outputs=[change])
        for wallet in (OWN, GROUP):
            assert len(store._issued_by_wallet[wallet].tokens) <= 2 * 101 + MAX_STALE_TOKENS
    assert await ids(store, owner="alice") == await ids(store, account="acme") == {f"{n}" for n in range(2_000, 2_100)}


async def test_an_empty_wallet_is_removed() -> None:
    store = MemoryTokenStore()
    await store.add([token(f"{number}", owner=f"{number}", account="acme") for number in range(10)])
    await store.spend([token(f"{number}") for number in range(10)], transaction="T")
    assert not store._issued_by_wallet


async def test_an_iteration_continues_while_its_wallet_is_compacted() -> None:
    store = MemoryTokenStore()
    many = [token(f"{number}") for number in range(3 * PAGE)]
    await store.add(many)
    walk = store.unspent(owner="alice", token_type="Fiat", identifier="GBP")
    found = await anext(walk)
    await store.spend(many[:-2], transaction="T")
    assert len(store._issued_by_wallet[OWN].tokens) < PAGE
    assert [page async for page in walk] == [many[-2:]]
    assert found == many[:PAGE]


async def test_an_unreferenced_change_feed_is_removed() -> None:
    store = MemoryTokenStore()
    changes = store.changes()
    assert await anext(changes) == Resync()
    assert store._feeds
    del changes
    gc.collect()
    assert not store._feeds

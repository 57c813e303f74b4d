"""What the recipes say about failures. test_examples.py executes their examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import blocks

from genie import RequestRejected, sync
from servers import Genie, running_server

RUN_ONCE = "docs/how-to/recipes/run-once.md"


@pytest.fixture
def once(genie: Genie, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("GENIE_HOST", genie.address[0])
    monkeypatch.setenv("GENIE_PORT", str(genie.port))
    module = {"__name__": "once"}
    (block,) = [block for block in blocks(RUN_ONCE) if block.lines[0] == "# once.py"]
    exec(block.text, module)  # noqa: S102 - this is the example
    return module["once"]  # type: ignore[return-value]


@pytest.mark.server
def test_a_job_that_fails_may_run_again_at_once(once: Callable[..., Any]) -> None:
    runs = []

    @once("jobs/fails", hold=300)
    def job() -> str:
        runs.append(1)
        if len(runs) == 1:
            raise KeyError
        return "done"

    with pytest.raises(KeyError):
        job()
    assert job() == "done"
    assert job() is None


@pytest.mark.server
def test_a_job_is_skipped_while_it_runs_elsewhere(once: Callable[..., Any], genie: Genie) -> None:
    with sync.connect(*genie.address) as client:

        @once("jobs/nested", hold=300)
        def outer() -> str:
            assert client.inspect(resource="jobs/nested").holders[0].expires_in > 250
            return inner() or "skipped"

        @once("jobs/nested", hold=300)
        def inner() -> str:
            return "ran twice"

        assert outer() == "skipped"


@pytest.mark.server
def test_a_job_that_has_run_stays_locked_for_the_whole_hold(once: Callable[..., Any], genie: Genie) -> None:
    with sync.connect(*genie.address) as client:

        @once("jobs/held", hold=300)
        def job() -> None:
            lock = client.inspect(resource="jobs/held").holders[0]
            client.extend(lock.id, 30)

        job()
        assert client.inspect(resource="jobs/held").holders[0].expires_in > 250
        assert client.release(client.inspect(resource="jobs/held").holders[0].id) == "success"
        job()
        assert client.inspect(resource="jobs/held").holders_total == 1


@pytest.mark.server
def test_a_handover_between_two_names_needs_admin_by_id_and_only_lock_by_the_transaction(tmp_path: Path) -> None:
    tokens = {name: f"the-token-of-{name}-in-the-tests" for name in ("orders", "payments")}
    path = tmp_path / "tokens"
    path.write_text("".join(f'[{name}]\ntoken = "{token}"\nmay = ["lock"]\n' for name, token in tokens.items()))
    path.chmod(0o600)
    with (
        running_server(token_file=path) as server,
        sync.connect(*server.address, token=tokens["orders"]) as orders,
        sync.connect(*server.address, token=tokens["payments"]) as payments,
    ):
        first = orders.acquire("orders/7", transaction="order-7")
        with pytest.raises(RequestRejected, match="unauthorized"):
            payments.extend(first.id, 60)
        assert payments.try_acquire("orders/7") is None
        second = payments.try_acquire("orders/7", transaction="order-7")
        assert second is not None
        first.release()
        assert orders.try_acquire("orders/7") is None
        assert second.held

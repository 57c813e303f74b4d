"""What the recipes say about failures. test_examples.py executes their examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pages import blocks

from genie import sync
from servers import Genie

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

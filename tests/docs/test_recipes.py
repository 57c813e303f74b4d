"""What the recipes say about failures. test_examples.py executes their examples."""

from __future__ import annotations

from pathlib import Path

import pytest
from matching import Screen
from pages import blocks
from test_examples import READ_TWICE, run_commands, run_python

from genie import RequestRejected, sync
from support.processes.servers import Genie, running_server


@pytest.mark.parametrize("page", READ_TWICE)
def test_the_examples_of_a_page_do_not_disturb_each_other_or_a_second_reader(
    page: str, environment: dict[str, str], genie: Genie, tmp_path: Path
) -> None:
    for _ in range(2):
        screen = Screen()
        for block, following in zip(blocks(page), [*blocks(page)[1:], None], strict=True):
            if block.language == "python":
                printed = run_python(block, environment, tmp_path)
                if following is not None and following.language == "text":
                    screen.match_all(following.lines, printed)
            elif block.language == "console":
                run_commands(block, screen, environment, genie)


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

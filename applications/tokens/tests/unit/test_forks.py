"""Forked processes: a selector that was started before the fork belongs to the parent process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.processes.servers import WAIT_S

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

REJECTED = "it was started before this process was forked, and belongs to the parent process"

BEGIN = """
import asyncio, os, sys
from concurrent.futures import ThreadPoolExecutor
from genie_tokens import InMemorySelector, MemoryTokenStore, Token
from genie_tokens.sync import InMemorySelector as SelectorForThreads

store = MemoryTokenStore()
alice = {"owner": "alice", "token_type": "Fiat", "identifier": "GBP"}
asyncio.run(store.add([Token(id=f"t{i}", amount=1, **alice) for i in range(10)]))

def in_child(function):
    child = os.fork()
    if child == 0:
        try:
            print(function())
        except BaseException as error:
            print(repr(error))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""

STARTED_FOR_THREADS = """
with SelectorForThreads(store) as selector, selector.select(3, transaction="parent", **alice) as selection:
    select = lambda: selector.select(3, transaction="child", **alice).tokens
    def select_in_a_thread():
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(select).result()
    for call in (select, select_in_a_thread, lambda: selection.held, selection.spend, selection.release, selector.close):
        in_child(call)
    print(selection.held, selection.amount)
"""

NEW_FOR_THREADS = """
selector = SelectorForThreads(store)
def select():
    with selector:
        return selector.select(3, transaction="t", **alice).amount
with ThreadPoolExecutor(1) as thread:  # the thread becomes the main thread of the child
    thread.submit(in_child, select).result()
print(select())
"""

FOR_ASYNCIO = """
async def main():
    async with InMemorySelector(store) as selector:
        selection = await selector.select(3, transaction="parent", **alice)
        def select():
            selecting = selector.select(3, transaction="child", **alice)
            try:
                selecting.send(None)
            except StopIteration as end:
                return end.value.tokens
        in_child(select)
        print(selection.held)
        await selection.release()
    new = InMemorySelector(store)
    async def start():
        async with new:
            return 3
    in_child(lambda: asyncio.new_event_loop().run_until_complete(start()))
asyncio.run(main())
"""


def output_of(program: str) -> list[str]:
    """Run a program whose processes print to the same output. Return its lines."""
    command = [sys.executable, "-W", "ignore", "-c", BEGIN + program]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_S).stdout.splitlines()


def test_calls_in_a_forked_process_neither_wait_forever_nor_select_tokens_of_the_parent() -> None:
    closed = f"Closed('the selector is closed: {REJECTED}')"
    assert output_of(STARTED_FOR_THREADS) == [closed] * 4 + ["None", "None", "True 3"]


def test_a_selector_that_was_not_started_before_the_fork_can_be_started_in_the_child() -> None:
    assert output_of(NEW_FOR_THREADS) == ["3", "3"]


def test_a_selector_for_asyncio_rejects_calls_in_a_forked_process() -> None:
    rejected = f'RuntimeError("this selector can\'t be used: {REJECTED}")'
    assert output_of(FOR_ASYNCIO) == [rejected, "True", "3"], "a selector that was not started can be started"

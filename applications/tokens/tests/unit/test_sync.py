"""The in-memory selector for threads: what the facade adds. The selection of tokens is tested with the asyncio selector."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import get_ident
from types import SimpleNamespace
from typing import Any, Self

import pytest

from genie_tokens import (
    FundsLocked,
    InsufficientFunds,
    MemoryTokenStore,
    SelectionEnded,
    SpentAlready,
    Token,
    TooManyTokens,
)
from genie_tokens import InMemorySelector as AsyncSelector
from genie_tokens.in_memory import background
from genie_tokens.in_memory.background import Background
from genie_tokens.sync import Consolidation, InMemorySelection, InMemorySelector
from scripted_tokens import ScriptedStore, make_tokens
from support.processes.servers import WAIT_S

GBP = {"token_type": "Fiat", "identifier": "GBP"}
ALICE = {"owner": "alice", **GBP}
THREADS = 8


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Let the interpreter switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(THREADS) as threads:
        yield threads


def run_in_all_threads(pool: ThreadPoolExecutor, work: Callable[[int], Any]) -> list[Any]:
    """Call a function in all threads of the pool at the same time; return the results."""
    begin = threading.Barrier(THREADS)

    def one(number: int) -> Any:
        begin.wait(WAIT_S)
        return work(number)

    return [future.result(WAIT_S) for future in [pool.submit(one, number) for number in range(THREADS)]]


def run_in_other_thread(pool: ThreadPoolExecutor, work: Callable[[], Any]) -> Any:
    """Call a function in a thread of the pool; return its result."""
    return pool.submit(work).result(WAIT_S)


def add(selector: InMemorySelector, tokens: list[Token]) -> None:
    """Issue tokens, and wait until the selector has added them."""

    async def add() -> None:
        await selector._store.add(tokens)
        while any(selector._selector._reservations.buckets.entry(token.id) is None for token in tokens):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)

    selector.run(add())


class Gate:
    """Blocks a call of the store: `reached` is set when it waits, and it continues after `open`."""

    def __init__(self, store: ScriptedStore, call: str) -> None:
        self.reached = threading.Event()
        self._open = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        store.before[call] = self._pass

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    async def _pass(self, _result: object) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached.set()
        await self._open.wait()


# -- many threads -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("frequent_thread_switches")
@pytest.mark.parametrize("max_tokens", [None, 100])
def test_threads_that_select_a_whole_wallet_get_no_token_twice(
    pool: ThreadPoolExecutor, max_tokens: int | None
) -> None:
    def take(number: int) -> list[InMemorySelection]:
        taken = []
        try:
            while True:
                taken.append(selector.select(3, transaction=f"tx{number}", **ALICE))
        except InsufficientFunds:
            return taken

    with InMemorySelector(ScriptedStore(make_tokens([1] * 3000), page=500), max_tokens=max_tokens) as selector:
        for _ in range(3):
            selections = [selection for taken in run_in_all_threads(pool, take) for selection in taken]
            given = Counter(token.id for selection in selections for token in selection.tokens)
            assert (len(given), set(given.values())) == (3000, {1})
            with pytest.raises(FundsLocked):
                selector.select(1, transaction="more", **ALICE)
            run_in_all_threads(pool, lambda number: [each.release() for each in selections[number::THREADS]])  # noqa: B023
        assert selector.select(3000, transaction="all", **ALICE).change == 0


@pytest.mark.usefixtures("frequent_thread_switches")
def test_a_call_is_atomic_even_if_its_predicate_yields_to_other_threads(pool: ThreadPoolExecutor) -> None:
    def where(_token: Token) -> bool:
        time.sleep(0)
        return True

    def take(number: int) -> list[InMemorySelection]:
        taken = []
        try:
            while True:
                taken.append(selector.select(100, transaction=f"tx{number}", where=where, limit=2, **ALICE))
        except (InsufficientFunds, TooManyTokens):
            return taken

    amounts = [1 + number * 37 % 100 for number in range(200)]
    with InMemorySelector(ScriptedStore(make_tokens(amounts))) as selector:
        selections = [selection for taken in run_in_all_threads(pool, take) for selection in taken]
        given = Counter(token.id for selection in selections for token in selection.tokens)
        assert set(given.values()) == {1}
        assert all(selection.held and len(selection.tokens) <= 2 for selection in selections)
        rest = sum(amounts) - sum(selection.amount for selection in selections)
        assert selector.select(rest, transaction="rest", **ALICE).change == 0


class Ledger(MemoryTokenStore):
    """A store that records each spend before it executes it."""

    def __init__(self) -> None:
        super().__init__()
        self.spends: list[tuple[str, str]] = []

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        await asyncio.sleep(0)
        self.spends += [(token.id, transaction) for token in tokens]
        await super().spend(tokens, transaction=transaction, outputs=outputs)


@pytest.mark.usefixtures("frequent_thread_switches")
@pytest.mark.parametrize("max_tokens", [None, 50])
def test_threads_that_spend_and_issue_change_conserve_the_total(
    pool: ThreadPoolExecutor, max_tokens: int | None
) -> None:
    ledger = Ledger()
    rounds, issued = 100, 200

    def pay(number: int) -> int:
        paid = 0
        for turn in range(rounds):
            name = f"{number}-{turn}"
            if number == 0:  # one thread issues tokens meanwhile
                selector.run(ledger.add(make_tokens([issued], f"issued-{name}-")))
                continue
            try:
                selection = selector.select(5 + turn % 7, transaction=name, **ALICE)
            except FundsLocked:
                continue
            with selection:
                assert selection.held
                if turn % 3:
                    change = make_tokens([selection.change] if selection.change else [], f"change-{name}-")
                    selection.spend(change)
                    paid += selection.target
        return paid

    with InMemorySelector(ledger, max_tokens=max_tokens) as selector:
        add(selector, make_tokens([20] * 300))
        paid = sum(run_in_all_threads(pool, pay))
        assert paid > 0
        spent = Counter(id for id, _ in ledger.spends)
        assert set(spent.values()) == {1}
        left = 300 * 20 + rounds * issued - paid
        assert selector.select(left, transaction="rest", **ALICE).change == 0


def test_change_can_be_selected_by_another_thread_as_soon_as_the_spend_returns(pool: ThreadPoolExecutor) -> None:
    with InMemorySelector(MemoryTokenStore()) as selector:
        add(selector, make_tokens([1000]))
        for number in range(100):
            selection = selector.select(1, transaction=f"tx{number}", **ALICE)
            run_in_other_thread(pool, lambda: selection.spend(make_tokens([selection.change], f"c{number}-")))  # noqa: B023
        assert selector.select(900, transaction="rest", **ALICE).amount == 900


# -- which thread does what ---------------------------------------------------------------------------------


def test_a_call_without_the_store_runs_in_its_thread_unless_that_is_the_main_thread(pool: ThreadPoolExecutor) -> None:
    seen: set[int] = set()

    def where(_token: Token) -> bool:
        seen.add(get_ident())
        return True

    def select() -> int:
        selector.select(1, transaction="tx", where=where, **ALICE).release()
        return get_ident()

    with InMemorySelector(ScriptedStore(make_tokens([1]))) as selector:
        assert seen == set()
        me = run_in_other_thread(pool, select)
        assert seen == {me}
        seen.clear()
        assert select() not in seen
        [loop] = [thread for thread in threading.enumerate() if thread.name == "genie-tokens"]
        assert seen == {loop.ident}


@pytest.mark.parametrize("call", ["select", "held", "release", "spend", "run"])
@pytest.mark.parametrize("main", [False, True])
def test_a_where_that_calls_the_selector_raises_and_changes_nothing(
    pool: ThreadPoolExecutor, call: str, main: bool
) -> None:
    with InMemorySelector(ScriptedStore(make_tokens([1] * 10))) as selector:
        first = selector.select(1, transaction="tx", **ALICE)
        calls: dict[str, Callable[[], object]] = {
            "select": lambda: selector.select(1, transaction="tx", **ALICE),
            "held": lambda: first.held,
            "release": first.release,
            "spend": first.spend,
            "run": lambda: selector.run(asyncio.sleep(0)),
        }

        def where(_token: Token) -> bool:
            calls[call]()
            return True

        def select() -> None:
            with pytest.raises(RuntimeError, match="by code that it executes"):
                selector.select(1, transaction="tx", where=where, **ALICE)

        select() if main else run_in_other_thread(pool, select)
        assert first.held
        assert selector.select(9, transaction="rest", **ALICE).amount == 9


def test_code_in_the_event_loop_can_neither_use_nor_close_the_selector() -> None:
    with InMemorySelector(ScriptedStore(make_tokens([1]))) as selector:

        async def close() -> None:
            selector.close()

        async def select() -> None:
            selector.select(1, transaction="tx", **ALICE)

        for coroutine in (close(), select()):
            with pytest.raises(RuntimeError, match="by code that it executes"):
                selector.run(coroutine)
        assert selector.select(1, transaction="tx", **ALICE).held


# -- interrupts ---------------------------------------------------------------------------------------------


class Interrupt:
    """Interrupts the main thread once, as Ctrl-C does."""

    def __init__(self) -> None:
        self._main = get_ident()
        self._raised = threading.Event()

    def handle(self, *_: object) -> None:
        if not self._raised.is_set():
            self._raised.set()
            raise KeyboardInterrupt

    def send(self) -> None:
        signal.pthread_kill(self._main, signal.SIGINT)

    def after(self, reached: threading.Event) -> None:
        """Send the signal repeatedly: one that arrives just before the thread begins to wait does not wake it."""
        assert reached.wait(WAIT_S)
        self.send()
        while not self._raised.wait(0.05):
            self.send()


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_a_select_that_waits_for_the_store_leaves_nothing_held(pool: ThreadPoolExecutor) -> None:
    store = ScriptedStore(make_tokens([1] * 10))
    with InMemorySelector(store, max_tokens=0) as selector, interruptible() as interrupt:
        gate = Gate(store, "get")
        interrupted = pool.submit(interrupt.after, gate.reached)
        with pytest.raises(KeyboardInterrupt):
            selector.select(10, transaction="tx", **ALICE)
        interrupted.result(WAIT_S)
        gate.open()
        assert selector.select(10, transaction="other", **ALICE).amount == 10


def test_ctrl_c_before_the_caller_gets_its_selection_releases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with InMemorySelector(ScriptedStore(make_tokens([1] * 10))) as selector, interruptible() as interrupt:
        select = selector._selector.select

        async def made(*args: Any, **options: Any) -> Any:
            selection = await select(*args, **options)
            interrupt.send()
            return selection

        monkeypatch.setattr(selector._selector, "select", made)
        with pytest.raises(KeyboardInterrupt):
            selector.select(10, transaction="tx", **ALICE)
        monkeypatch.undo()
        selector.run(asyncio.sleep(0))  # what is to be done in the loop is done in order
        assert selector.select(10, transaction="other", **ALICE).amount == 10


def test_ctrl_c_during_a_spend_leaves_the_tokens_held_and_it_can_be_retried(pool: ThreadPoolExecutor) -> None:
    store = ScriptedStore(make_tokens([1] * 10))
    with InMemorySelector(store) as selector, interruptible() as interrupt:
        selection = selector.select(10, transaction="tx", **ALICE)
        gate = Gate(store, "spend")
        interrupted = pool.submit(interrupt.after, gate.reached)
        with pytest.raises(KeyboardInterrupt):
            selection.spend()
        interrupted.result(WAIT_S)
        gate.open()
        selection.release()
        with pytest.raises(InsufficientFunds):
            selector.select(1, transaction="other", **ALICE)
        selection.spend()
        assert set(store.spenders.values()) == {"tx"}


def test_ctrl_c_during_the_first_load_closes_the_selector(pool: ThreadPoolExecutor) -> None:
    store = ScriptedStore(make_tokens([1] * 10))
    gate = Gate(store, "page")
    selector = InMemorySelector(store)
    with interruptible() as interrupt:
        interrupted = pool.submit(interrupt.after, gate.reached)
        with pytest.raises(KeyboardInterrupt):
            selector.start()
        interrupted.result(WAIT_S)
    assert "genie-tokens" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        selector.select(1, transaction="tx", **ALICE)


@pytest.mark.parametrize("failing", [False, True])
def test_an_interrupted_call_is_undone_once(failing: bool) -> None:
    undone: list[int] = []
    loop = Background("genie-tokens")
    with interruptible() as interrupt:

        async def work() -> int:
            interrupt.send()
            if failing:
                raise ZeroDivisionError
            return 5

        with pytest.raises(KeyboardInterrupt):
            loop.run(work(), undone.append)
        loop.run(asyncio.sleep(0))
        assert undone == ([] if failing else [5])
    loop.stop()


# -- opening and closing ------------------------------------------------------------------------------------


class Opened(MemoryTokenStore):
    """A store that records the threads in which it is opened and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str]] = []

    async def __aenter__(self) -> Self:
        self.log.append(("opened", threading.current_thread().name))
        return self

    async def close(self) -> None:
        self.log.append(("closed", threading.current_thread().name))
        await super().close()


def test_the_store_is_opened_and_closed_in_the_event_loop_of_the_selector() -> None:
    store = Opened()
    with InMemorySelector(store) as selector:
        assert store.log == [("opened", "genie-tokens")]
        add(selector, make_tokens([7]))
        assert selector.select(7, transaction="tx", **ALICE).amount == 7
        assert selector.store_error is None
    assert store.log == [("opened", "genie-tokens"), ("closed", "genie-tokens")]
    assert "genie-tokens" not in {thread.name for thread in threading.enumerate()}
    selector.close()
    assert len(store.log) == 2


def test_a_failed_first_load_raises_and_closes_the_store() -> None:
    class Broken(Opened):
        def changes(self) -> Any:
            raise ConnectionError("no database")

    store = Broken()
    selector = InMemorySelector(store)
    with pytest.raises(ConnectionError, match="no database"), selector:
        pass
    assert [what for what, _ in store.log] == ["opened", "closed"]
    assert "genie-tokens" not in {thread.name for thread in threading.enumerate()}


def test_a_selector_starts_once_and_is_usable_only_while_open(pool: ThreadPoolExecutor) -> None:
    selector = InMemorySelector(ScriptedStore(make_tokens([1] * 10)))

    def check(message: str) -> None:
        for place in (lambda work: work(), lambda work: run_in_other_thread(pool, work)):
            with pytest.raises(RuntimeError, match=message):
                place(lambda: selector.select(1, transaction="tx", **ALICE))

    check("not open: use")
    with selector:
        with pytest.raises(RuntimeError, match="started only once"):
            selector.start()
        selection = selector.select(1, transaction="tx", **ALICE)
    check("the selector is closed")
    for call in (selection.spend, selection.checkpoint, lambda: selection.held, lambda: selector.run(asyncio.sleep(0))):
        with pytest.raises(RuntimeError, match="the selector is closed"):
            call()
    assert (selection.amount, len(selection.tokens), selection.transaction) == (1, 1, "tx")
    selection.release()
    run_in_other_thread(pool, selection.release)


def test_close_waits_for_spends_but_not_for_selections(pool: ThreadPoolExecutor) -> None:
    store = ScriptedStore(make_tokens([1] * 10))
    selector = InMemorySelector(store, max_tokens=1)
    selector.start()
    selection = selector.select(1, transaction="tx", **ALICE)
    reading, spending = Gate(store, "get"), Gate(store, "spend")
    select = pool.submit(lambda: selector.select(9, transaction="late", **ALICE))
    spend = pool.submit(selection.spend)
    assert reading.reached.wait(WAIT_S)
    assert spending.reached.wait(WAIT_S)
    closed = pool.submit(selector.close)
    also = pool.submit(selector.close)
    while not selector._spends._closed:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        selector.run(selector._spends.spend(selection._inner, ()))
    assert [spend.done(), closed.done(), also.done()] == [False] * 3
    spending.open()
    for future in (spend, closed, also):
        future.result(WAIT_S)
    assert set(store.spenders.values()) == {"tx"}
    with pytest.raises(RuntimeError, match="the selector is closed: the call was cancelled"):
        select.result(WAIT_S)


def test_threads_that_select_during_the_first_load_wait_for_it(pool: ThreadPoolExecutor) -> None:
    store = ScriptedStore(make_tokens([1] * 10))
    gate = Gate(store, "page")
    selector = InMemorySelector(store)
    starting = pool.submit(selector.start)
    assert gate.reached.wait(WAIT_S)
    selecting: list[Future[InMemorySelection]] = [
        pool.submit(selector.select, 1, transaction=f"tx{number}", **ALICE) for number in range(5)
    ]
    gate.open()
    starting.result(WAIT_S)
    assert len({each.result(WAIT_S).tokens[0].id for each in selecting}) == 5
    selector.close()


@pytest.mark.usefixtures("frequent_thread_switches")
def test_calls_during_close_fail_and_none_hangs(pool: ThreadPoolExecutor) -> None:
    for _ in range(20):
        selector = InMemorySelector(ScriptedStore(make_tokens([1])))
        selector.start()

        def work(number: int) -> str:
            if number == 0:
                selector.close()  # noqa: B023
                return "closed"
            try:
                while True:
                    selector.run(asyncio.sleep(0))  # noqa: B023
            except RuntimeError as error:
                return str(error)

        messages = run_in_all_threads(pool, work)
        assert all("closed" in message for message in messages)


@pytest.mark.parametrize("call", ["__init__", "select", "consolidate", "restore"])
def test_the_arguments_are_those_of_the_asyncio_selector(call: str) -> None:
    def arguments(kind: type) -> list[tuple[str, object, object]]:
        parameters = inspect.signature(getattr(kind, call)).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    assert arguments(InMemorySelector) == arguments(AsyncSelector)


# -- the rest of the calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("main", [False, True])
def test_the_calls_are_those_of_the_asyncio_selector(pool: ThreadPoolExecutor, main: bool) -> None:
    store = ScriptedStore(make_tokens([10] * 50, account="household"))
    with InMemorySelector(store) as selector:

        def use() -> None:
            with selector.select(25, transaction="tx", account="household", limit=3, **GBP) as selection:
                assert (selection.amount, selection.target, selection.change) == (30, 25, 5)
                assert (selection.transaction, selection.held, selection.lost) == ("tx", True, ())
                saved = json.loads(json.dumps(selection.checkpoint()))
                restored = selector.restore(saved)
                assert not selection.held
                assert restored.held
                assert type(restored) is InMemorySelection
                restored.release()
            joined = selector.consolidate(transaction="join", into=2, at_most=20, **ALICE)
            assert joined is not None
            assert (len(joined.tokens), joined.amounts) == (20, (100, 100))
            again = selector.restore(joined.checkpoint())
            assert isinstance(again, Consolidation)
            assert again.amounts == (100, 100)
            again.release()
            assert selector.consolidate(transaction="join", where=lambda _: False, **ALICE) is None
            paid = selector.select(10, transaction="pay", **ALICE)
            paid.spend()
            with pytest.raises(SelectionEnded):
                paid.spend()
            stolen = selector.select(10, transaction="stolen", **ALICE)
            selector.run(store.spend(stolen.tokens, transaction="thief"))
            with pytest.raises(SpentAlready):
                stolen.spend()
            with pytest.raises(ValueError, match="amount"):
                selector.select(0, transaction="tx", **ALICE)

        use() if main else run_in_other_thread(pool, use)


@pytest.mark.parametrize("main", [False, True])
def test_a_selection_can_be_restored_before_the_start(pool: ThreadPoolExecutor, main: bool) -> None:
    tokens = make_tokens([10] * 3)
    with InMemorySelector(ScriptedStore(tokens)) as selector:
        saved = selector.select(20, transaction="before", **ALICE).checkpoint()
    selector = InMemorySelector(ScriptedStore(tokens))
    restored = selector.restore(saved) if main else run_in_other_thread(pool, lambda: selector.restore(saved))
    with selector:
        with pytest.raises(FundsLocked):
            selector.select(20, transaction="after", **ALICE)
        assert restored.held


def test_a_selection_expires_after_its_own_auto_unlock(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now))
    with InMemorySelector(ScriptedStore(make_tokens([1] * 4)), auto_unlock=100) as selector:
        default = selector.select(1, transaction="default", **ALICE)
        short = selector.select(1, transaction="short", auto_unlock=10, **ALICE)
        joined = selector.consolidate(transaction="join", at_most=2, auto_unlock=20, **ALICE)
        assert joined is not None
        now = 1010.0
        assert (default.held, short.held, joined.held) == (True, False, True)
        again = run_in_other_thread(pool, lambda: selector.restore(joined.checkpoint(), auto_unlock=200))
        now = 1100.0
        assert (default.held, again.held) == (False, True)
        now = 1210.0
        assert selector.select(4, transaction="all", **ALICE).amount == 4


def test_the_protected_selector_rejects_calls_that_bypass_the_facade(pool: ThreadPoolExecutor) -> None:
    with InMemorySelector(ScriptedStore(make_tokens([1]))) as selector:
        selection = selector.select(1, transaction="tx", **ALICE)

        def bypass_facade() -> None:
            asyncio.run(selection._inner.release())

        with pytest.raises(RuntimeError, match="only through its facade"):
            run_in_other_thread(pool, bypass_facade)
        assert selection.held

package dev.genielock;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** A client believes in a lock no longer than the server: with a clock that the test moves, and a scripted server. */
@Timeout(60)
class LeaseTest {
    private static final int LIMIT_S = 20;

    private final FakeClock clock = new FakeClock();
    private FakeServer server;
    private GenieClient client;
    private FakeServer.Peer peer;

    @BeforeEach
    void connect() throws Exception {
        server = new FakeServer();
        var connected = CompletableFuture.supplyAsync(() -> {
            try {
                return GenieClient.builder().addresses(server.address()).sessionTimeout(Duration.ofSeconds(10)).connect(clock);
            } catch (InterruptedException e) {
                throw new IllegalStateException(e);
            }
        });
        peer = server.handshake(false);
        client = connected.get(LIMIT_S, TimeUnit.SECONDS);
    }

    @AfterEach
    void close() throws Exception {
        peer.close();
        server.close();
        client.close();
    }

    private Lock lock(long id, LockOptions options) throws Exception {
        var granted = client.lockAsync(options, "a");
        peer.grant(id);
        return granted.get(LIMIT_S, TimeUnit.SECONDS);
    }

    private static LockLostException loss(CompletableFuture<LockLostException> lost) throws Exception {
        return lost.get(LIMIT_S, TimeUnit.SECONDS);
    }

    @Test
    void aLockEndsByTheClockOfTheClient() throws Exception {
        Lock lock = lock(7, LockOptions.of().transactionTimeout(Duration.ofSeconds(1)));
        var lost = lock.lost();
        assertEquals(Duration.ofSeconds(1), lock.remaining());
        clock.advanceMs(999);
        assertTrue(lock.isHeld());
        assertFalse(lost.isDone());
        clock.advanceMs(1);
        assertFalse(lock.isHeld());
        assertEquals("transaction-timeout", loss(lost).reason());
        assertThrows(LockLostException.class, lock::ensureHeld);
        assertThrows(LockLostException.class, () -> lock.extend(Duration.ofSeconds(1)));
        assertEquals(Duration.ZERO, lock.remaining());
    }

    @Test
    void aSuspendedProgramReadsTheClock() throws Exception {
        Lock lock = lock(7, LockOptions.of().transactionTimeout(Duration.ofSeconds(1)));
        clock.jumpMs(1000); // no timer has fired
        assertFalse(lock.isHeld());
        assertEquals("transaction-timeout", assertThrows(LockLostException.class, lock::ensureHeld).reason());
    }

    @Test
    void aLateGrantIsExtendedBeforeItsCallerHasIt() throws Exception {
        var granted = client.lockAsync(LockOptions.of().transactionTimeout(Duration.ofSeconds(4)), "a");
        var request = peer.expect("request");
        clock.jumpMs(1001); // more than a quarter
        peer.answer("locked", "id", 7, "fence", 1, "ref", request.get("ref"));
        var extend = peer.expect("extend");
        assertEquals(4000L, extend.get("transactionTimeout"));
        assertFalse(granted.isDone());
        peer.answer("extended", "id", 7, "transactionTimeout", 4000, "ref", extend.get("ref"));
        Lock lock = granted.get(LIMIT_S, TimeUnit.SECONDS);
        assertEquals(Duration.ofSeconds(4), lock.remaining());
    }

    @Test
    void aLateGrantThatCannotBeExtendedIsReleased() throws Exception {
        var granted = client.lockAsync(LockOptions.of().transactionTimeout(Duration.ofSeconds(4)), "a");
        var request = peer.expect("request");
        clock.jumpMs(3000);
        peer.answer("locked", "id", 7, "fence", 1, "ref", request.get("ref"));
        var extend = peer.expect("extend");
        granted.cancel(false);
        peer.answer("extended", "id", 7, "transactionTimeout", 4000, "ref", extend.get("ref"));
        assertEquals(7L, peer.expect("release").get("id"));
    }

    @Test
    void aLateGrantWhoseExtensionIsInterruptedIsReleased() throws Exception {
        var interrupted = new CompletableFuture<Boolean>();
        var thread = new Thread(() -> {
            try {
                client.lock("a");
            } catch (InterruptedException e) {
                interrupted.complete(true);
            }
        });
        thread.start();
        var request = peer.expect("request");
        clock.jumpMs(9000);
        peer.answer("locked", "id", 7, "fence", 1, "ref", request.get("ref"));
        peer.expect("extend");
        thread.interrupt();
        assertTrue(interrupted.get(LIMIT_S, TimeUnit.SECONDS));
        assertEquals(7L, peer.expect("release").get("id"));
    }

    @Test
    void theWatchdogExtendsAtAThird() throws Exception {
        Lock lock = lock(7, LockOptions.of().transactionTimeout(Duration.ofSeconds(3)).watchdog());
        clock.advanceMs(1000);
        var extend = peer.expect("extend");
        peer.answer("extended", "id", 7, "transactionTimeout", 3000, "ref", extend.get("ref"));
        client.release(peerAnswersLater()); // the answer to a later command: the extension was handled
        assertEquals(Duration.ofSeconds(3), lock.remaining());
        assertFalse(lock.lost().isDone());
    }

    private long peerAnswersLater() {
        CompletableFuture.runAsync(() -> {
            try {
                var release = peer.expect("release");
                peer.answer("released", "id", release.get("id"), "reason", "success", "ref", release.get("ref"));
            } catch (Exception e) {
                throw new IllegalStateException(e);
            }
        });
        return 99;
    }

    @Test
    void aShorterExtensionCountsFromItsSending() throws Exception {
        Lock lock = lock(7, LockOptions.of().transactionTimeout(Duration.ofSeconds(10)));
        var extended = lock.extendAsync(Duration.ofSeconds(2));
        peer.expect("extend"); // and no answer
        assertEquals(Duration.ofSeconds(2), lock.remaining());
        clock.jumpMs(2000);
        assertFalse(lock.isHeld());
        assertEquals(7L, peer.expect("release").get("id")); // the server may hold it for longer
        assertThrows(Exception.class, () -> extended.get(1, TimeUnit.MILLISECONDS));
    }

    @Test
    void theLeaseOfTheSessionEndsAlthoughOtherMessagesArrive() throws Exception {
        Lock lock = lock(7, LockOptions.of().transactionTimeout(Duration.ofMinutes(10)).releaseOnDisconnect());
        Watch watch = client.watch("x");
        peer.answer("watching", "prefix", "x", "held", List.of(), "ref", peer.expect("watch").get("ref"));
        assertEquals("resync", watch.next().state());
        var lost = lock.lost();
        assertEquals(Duration.ofSeconds(10), lock.remaining());
        clock.jumpMs(9_999);
        peer.answer("event", "state", "locked", "resource", "x", "id", 3); // answers nothing
        assertEquals("locked", watch.next().state()); // and was handled
        assertTrue(lock.isHeld());
        clock.jumpMs(1);
        assertFalse(lock.isHeld());
        assertEquals("disconnected", loss(lost).reason());
        assertEquals(7L, peer.expect("release").get("id"));
    }

    @Test
    void aPingRenewsTheLease() throws Exception {
        Lock lock = lock(7, LockOptions.of().transactionTimeout(Duration.ofMinutes(10)).releaseOnDisconnect());
        clock.advanceMs(2000);
        var ping = peer.expect("ping");
        peer.answer("pong", "ref", ping.get("ref"));
        client.release(peerAnswersLater());
        clock.jumpMs(9_999);
        assertTrue(lock.isHeld());
        clock.jumpMs(1);
        assertFalse(lock.isHeld());
    }

    @Test
    void aReleasedLockIsNotLost() throws Exception {
        Lock lock = lock(7, LockOptions.of());
        var lost = lock.lost();
        var released = lock.releaseAsync();
        var again = lock.releaseAsync();
        var release = peer.expect("release");
        peer.answer("released", "id", 7, "reason", "success", "ref", release.get("ref"));
        released.get(LIMIT_S, TimeUnit.SECONDS);
        again.get(LIMIT_S, TimeUnit.SECONDS);
        var ended = assertThrows(ExecutionException.class, () -> lost.get(LIMIT_S, TimeUnit.SECONDS));
        assertInstanceOf(LockEndedException.class, ended.getCause());
        assertThrows(LockEndedException.class, lock::ensureHeld);
        lock.release(); // does nothing
        lock.close();
    }

    @Test
    void aLossBeforeTheReleaseIsReportedByClose() throws Exception {
        Lock lock = lock(7, LockOptions.of());
        peer.answer("released", "id", 7, "reason", "transaction-timeout", "held", 10_000, "ref", "1");
        loss(lock.lost());
        assertThrows(LockLostException.class, lock::close);
        var work = assertThrows(IllegalStateException.class, () -> {
            try (lock) {
                throw new IllegalStateException("the work");
            }
        });
        assertTrue(work.getSuppressed()[0] instanceof LockLostException);
        assertThrows(LockLostException.class, () -> { // the same exception is not suppressed in itself
            try (lock) {
                lock.ensureHeld();
            }
        });
    }
}

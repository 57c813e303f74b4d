package dev.genielock;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

/** The API with a real server. */
@Timeout(60)
@EnabledIfEnvironmentVariable(named = "GENIE_COMMAND", matches = ".+", disabledReason = "GENIE_COMMAND starts the server")
class ServerTest {
    private static Servers.Server server;
    private static GenieClient client;

    @BeforeAll
    static void start() throws Exception {
        server = Servers.genie(Map.of("GENIE_TOKEN", "secret-of-the-test")).start();
        client = builder().connect();
    }

    private static GenieClient.Builder builder() {
        return GenieClient.builder().addresses(server.address()).token(() -> "secret-of-the-test")
                .responseTimeout(Duration.ofSeconds(20));
    }

    @AfterAll
    static void stop() {
        client.close();
        server.close();
    }

    @Test
    void kindsOfResources() throws Exception {
        try (Lock all = client.lock("kinds/1", Resources.shared("kinds/2"), Resources.units("kinds/3", 2, 3),
                Resources.subtree("kinds/4"))) {
            assertEquals(List.of("exclusive:kinds/1", "shared:kinds/2", "2/3:kinds/3", "exclusive:kinds/4/**"), all.resources());
            assertTrue(client.tryLock("kinds/4/x").isEmpty());
            assertTrue(client.tryLock(Resources.units("kinds/3", 2, 3)).isEmpty());
            try (Lock rest = client.lock(Resources.units("kinds/3", 1, 3), Resources.shared("kinds/2"))) {
                assertTrue(rest.fence() > all.fence());
            }
        }
    }

    @Test
    void aTimeoutNamesItsBlockers() throws Exception {
        try (Lock held = client.lock(LockOptions.of().note("the nightly job"), "blocked")) {
            var timeout = assertThrows(QueueTimeoutException.class,
                    () -> client.lock(LockOptions.of().queueTimeout(Duration.ofMillis(1)), "blocked"));
            assertEquals(1, timeout.blockersTotal());
            Blocker blocker = timeout.blockers().get(0);
            assertEquals(held.id(), blocker.id());
            assertEquals("the nightly job", blocker.note().orElseThrow());
            assertTrue(timeout.getMessage().endsWith(held.id() + " (the nightly job) holds exclusive:blocked"), timeout.getMessage());
            var row = client.inspect(InspectQuery.all().id(held.id())).holders().get(0);
            assertEquals(held.fence(), row.fence());
            assertTrue(row.expiresIn().orElseThrow().compareTo(Duration.ofSeconds(10)) <= 0);
        }
    }

    @Test
    void anyOf() throws Exception {
        AnyOf choices = AnyOf.target(35).choice("token/1", 50).choice("token/2", 20).choice("token/3", 20);
        try (Lock first = client.lock("token/1"); Lock chosen = client.lockAny(choices)) {
            assertEquals(List.of("exclusive:token/2", "exclusive:token/3"), chosen.resources());
            var failure = assertThrows(InsufficientException.class, () -> client.lockAny(choices));
            assertEquals(List.of(0L, 90L), List.of(failure.free().longValueExact(), failure.locked().longValueExact()));
            assertTrue(first.isHeld());
            var failed = client.lockAnyAsync(LockOptions.of(), choices);
            var cause = assertThrows(ExecutionException.class, () -> failed.get(20, TimeUnit.SECONDS)).getCause();
            assertEquals(90, ((InsufficientException) cause).locked().longValueExact());
        }
        try (Lock chosen = client.lockAnyAsync(LockOptions.of(), choices).get(20, TimeUnit.SECONDS)) {
            assertEquals(List.of("exclusive:token/1"), chosen.resources());
        }
    }

    @Test
    void aTransactionStartsOverAfterADeadlock() throws Exception {
        var barrier = new CyclicBarrier(2);
        var attempts = new AtomicInteger();
        var other = CompletableFuture.runAsync(() -> lockBoth("deadlock/1", "deadlock/2", barrier, attempts));
        lockBoth("deadlock/2", "deadlock/1", barrier, attempts);
        other.get(20, TimeUnit.SECONDS);
        assertEquals(3, attempts.get());
    }

    private static void lockBoth(String first, String second, CyclicBarrier barrier, AtomicInteger attempts) {
        try {
            var isFirst = new AtomicInteger();
            long fence = client.<Long, Exception>transactionResult(tx -> {
                attempts.incrementAndGet();
                tx.lock(first);
                if (isFirst.getAndIncrement() == 0) {
                    barrier.await(20, TimeUnit.SECONDS);
                }
                tx.lock(second);
                tx.ensureHeld();
                return tx.fence();
            });
            assertTrue(fence > 0);
        } catch (Exception e) {
            throw new IllegalStateException(e);
        }
    }

    @Test
    void theExceptionOfTheWorkIsThatOfTheTransaction() throws Exception {
        assertThrows(IOException.class, () -> client.transaction(tx -> {
            tx.lock("failing");
            throw new IOException("the work");
        }));
        client.lock("failing").release();
        var deadlock = new DeadlockException(1, List.of("a"), List.of());
        var attempts = new AtomicInteger();
        assertThrows(IllegalStateException.class, () -> client.transaction(LockOptions.of().attempts(2), tx -> {
            attempts.incrementAndGet();
            throw new IllegalStateException(deadlock);
        }));
        assertEquals(2, attempts.get());
    }

    @Test
    void aLostLockIsTheExceptionOfTheTransaction() throws Exception {
        var lost = assertThrows(LockLostException.class, () -> client.transaction(tx -> client.release(tx.lock("lost").id())));
        assertEquals("success", lost.reason());
        var work = assertThrows(IOException.class, () -> client.transaction(tx -> {
            client.release(tx.lock("lost").id());
            throw new IOException("the work");
        }));
        assertTrue(work.getSuppressed()[0] instanceof LockLostException);
        var escaped = new Transaction[1];
        client.transaction(tx -> {
            escaped[0] = tx;
        });
        assertThrows(LockEndedException.class, () -> escaped[0].lock("late"));
    }

    @Test
    void aLockChangesItsHolder() throws Exception {
        Lock lock = client.lock("handed-over");
        long id = lock.detach();
        assertFalse(lock.isHeld());
        lock.close(); // leaves it alone
        try (var second = builder().connect()) {
            second.extend(id, Duration.ofSeconds(20));
            second.release(id);
            second.release(id); // it was released
            assertThrows(LockLostException.class, () -> second.extend(id, Duration.ofSeconds(1)));
            assertEquals("unknown-id", assertThrows(RejectedException.class, () -> second.release(1)).code());
        }
    }

    @Test
    void anElectionHasALeader() throws Exception {
        client.elect("leader/test", LockOptions.of().note("candidate").releaseOnDisconnect(), lock -> {
            assertEquals("candidate", client.leader("leader/test").orElseThrow().note().orElseThrow());
            assertTrue(client.tryLock("leader/test").isEmpty());
        });
        assertTrue(client.leader("leader/test").isEmpty());
        client.elect("leader/test", lock -> assertEquals(lock.id(), client.leader("leader/test").orElseThrow().id()));
    }

    @Test
    void aWatchFollowsLocks() throws Exception {
        try (Lock held = client.lock("watched/1"); Watch watch = client.watch("watched/")) {
            assertEquals("resync", watch.next().state());
            assertEquals(held.id(), watch.next().id());
            client.lock(Resources.units("watched/2", 1, 3)).release();
            Change locked = watch.next();
            assertEquals(List.of("locked", "watched/2", "units"), List.of(locked.state(), locked.resource(), locked.mode()));
            assertEquals(locked.withState("unlocked"), watch.next());
            assertTrue(watch.poll(Duration.ZERO).isEmpty());
            client.lock("watched/3").release();
            for (Change change : watch) {
                assertEquals("watched/3", change.resource());
                if (change.state().equals("unlocked")) {
                    watch.close(); // ends the loop
                }
            }
            assertThrows(NoSuchElementException.class, watch.iterator()::next);
        }
    }

    @Test
    void aWrongTokenIsRejected() {
        assertEquals("unauthorized",
                assertThrows(RejectedException.class, () -> builder().token(() -> "wrong").connect()).code());
    }
}

package dev.genielock;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.ObjectInputStream;
import java.io.ObjectOutputStream;
import java.math.BigInteger;
import java.time.Duration;
import java.util.List;
import org.junit.jupiter.api.Test;

/** Exceptions that a framework passes to another process keep what they tell. */
class ExceptionTest {
    @SuppressWarnings("unchecked")
    private static <T extends GenieException> T copied(T failure) throws Exception {
        var bytes = new ByteArrayOutputStream();
        new ObjectOutputStream(bytes).writeObject(failure);
        return (T) new ObjectInputStream(new ByteArrayInputStream(bytes.toByteArray())).readObject();
    }

    @Test
    void serialization() throws Exception {
        var lost = copied(new LockLostException(7, LockLostException.TRANSACTION_TIMEOUT));
        assertEquals(7, lost.id());
        assertEquals("transaction-timeout", lost.reason());
        assertEquals("bad-request", copied(RejectedException.badRequest("x")).code());
        assertEquals("success", copied(new RequestEndedException(7, "success")).reason());
        assertEquals(BigInteger.TEN, copied(new InsufficientException(7, BigInteger.TEN, BigInteger.ONE)).free());
        var timeout = copied(new QueueTimeoutException(7, Duration.ofMillis(20), List.of(), 3));
        assertEquals(Duration.ofMillis(20), timeout.waited());
        assertEquals(List.of(), timeout.blockers());
        assertEquals(3, timeout.blockersTotal());
        var deadlock = copied(new DeadlockException(7, List.of("a", "b"), List.of()));
        assertEquals(List.of(), deadlock.cycle());
        assertEquals(List.of(), deadlock.waits());
        assertEquals("request 7 would deadlock: a → b → a", deadlock.getMessage());
    }
}

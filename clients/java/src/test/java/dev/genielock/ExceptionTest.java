package dev.genielock;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.ObjectInputStream;
import java.io.ObjectOutputStream;
import java.math.BigInteger;
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
    }
}

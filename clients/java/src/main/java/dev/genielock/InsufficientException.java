package dev.genielock;

import java.math.BigInteger;

/** {@link GenieClient#lockAny} has locked nothing, because the free resources do not reach the target. */
public final class InsufficientException extends GenieException {
    private static final long serialVersionUID = 1L;

    /** As returned. */
    private final long id;
    /** As returned. */
    private final BigInteger free;
    /** As returned. */
    private final BigInteger locked;

    InsufficientException(long id, BigInteger free, BigInteger locked) {
        super("request " + id + " locked nothing: " + free + " is free, " + locked + " is locked by others", null);
        this.id = id;
        this.free = free;
        this.locked = locked;
    }

    /** {@return the id of the request} */
    public long id() { return id; }

    /** {@return the sum of the weights of the free resources} */
    public BigInteger free() { return free; }

    /** {@return the sum of the weights of the other resources} */
    public BigInteger locked() { return locked; }
}

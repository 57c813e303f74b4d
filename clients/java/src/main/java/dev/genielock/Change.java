package dev.genielock;

import java.util.Optional;

/**
 * A change of the locks that a {@link Watch} follows.
 *
 * @param state {@code locked} or {@code unlocked}. {@code resync} has no other components but {@code isTruncated}: the watch begins
 *     or was interrupted, and the next changes lead from the last reported locks to the present ones. Locks that were held only in
 *     between are not reported
 * @param resource the name, without a mode
 * @param mode {@code shared}, {@code exclusive} or {@code units}
 * @param units the units of the lock; 0 if the mode is another one
 * @param of the limit of the units; 0 if the mode is another one
 * @param id the id of the lock
 * @param transaction the transaction to which it belongs
 * @param isTruncated more locks are held than the server searches or lists. The end of such a lock is not always
 *     reported, or too early: if more than 100,000 reported locks are not listed, the oldest of them are reported as unlocked
 */
public record Change(String state, String resource, String mode, int units, int of, long id, Optional<String> transaction,
        boolean isTruncated) {
    static Change resync(boolean isTruncated) { return new Change("resync", "", "", 0, 0, 0, Optional.empty(), isTruncated); }

    Change withState(String newState) { return new Change(newState, resource, mode, units, of, id, transaction, isTruncated); }

    boolean conflictsWith(Change other) {
        boolean isSameOwner = id == other.id || transaction.isPresent() && transaction.equals(other.transaction);
        return !isSameOwner && (!mode.equals(other.mode) || mode.equals("exclusive")); // units exclude by their number only
    }
}

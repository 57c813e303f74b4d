/**
 * The client of Genie, a lock server for distributed transactions. Begin with {@link dev.genielock.GenieClient}.
 *
 * <p>No parameter may be {@code null}, and no method returns {@code null}: what may be missing is an
 * {@link java.util.Optional}. All classes are safe for use by several threads, except the builders. Methods that wait for a
 * server block without {@code synchronized}, so they suit virtual threads, and throw {@link InterruptedException}: an
 * interrupted call leaves nothing held.
 */
package dev.genielock;

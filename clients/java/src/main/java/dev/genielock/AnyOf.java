package dev.genielock;

import java.math.BigInteger;
import java.util.List;
import java.util.stream.Stream;

/**
 * The resources from which {@link GenieClient#lockAny} chooses, and the sum of weights to reach. Each method returns a copy.
 *
 * <pre>{@code AnyOf.target(35).choice("token/1", 20).choice("token/2", 20)}</pre>
 *
 * @param target the sum of weights to reach, at least 1
 * @param resources with their modes
 * @param weights the weight of each resource, at least 1
 */
public record AnyOf(BigInteger target, List<String> resources, List<BigInteger> weights) {
    /**
     * Copies the lists.
     *
     * @param target the sum of weights to reach, at least 1
     * @param resources with their modes
     * @param weights the weight of each resource, at least 1
     */
    public AnyOf {
        resources = List.copyOf(resources);
        weights = List.copyOf(weights);
    }

    /**
     * Begins with a target and without choices.
     *
     * @param target the sum of weights to reach, at least 1
     * @return the choices
     */
    public static AnyOf target(long target) { return target(BigInteger.valueOf(target)); }

    /**
     * Begins with a target and without choices.
     *
     * @param target the sum of weights to reach, at least 1
     * @return the choices
     */
    public static AnyOf target(BigInteger target) { return new AnyOf(target, List.of(), List.of()); }

    /**
     * Adds a resource with the weight 1.
     *
     * @param resource the resource, as in {@link Resources}
     * @return the choices
     */
    public AnyOf choice(String resource) { return choice(resource, BigInteger.ONE); }

    /**
     * Adds a resource.
     *
     * @param resource the resource, as in {@link Resources}
     * @param weight its weight, at least 1
     * @return the choices
     */
    public AnyOf choice(String resource, long weight) { return choice(resource, BigInteger.valueOf(weight)); }

    /**
     * Adds a resource.
     *
     * @param resource the resource, as in {@link Resources}
     * @param weight its weight, at least 1
     * @return the choices
     */
    public AnyOf choice(String resource, BigInteger weight) {
        return new AnyOf(target, Stream.concat(resources.stream(), Stream.of(Resources.withMode(resource))).toList(),
                Stream.concat(weights.stream(), Stream.of(weight)).toList());
    }

    /** Returns the names and values of the fields of the request. */
    Object[] fields() {
        var texts = weights.stream().map(BigInteger::toString).toList();
        return new Object[] {"anyOf", resources, "weights", texts, "target", target.toString()};
    }
}

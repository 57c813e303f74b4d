package dev.genielock;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.List;

/**
 * The resources from which {@link GenieClient#lockAny} chooses, and the sum of weights to reach. Immutable.
 *
 * <pre>{@code AnyOf.target(35).choice("token/1", 20).choice("token/2", 20)}</pre>
 */
public final class AnyOf {
    private final BigInteger target;
    private final List<String> resources;
    private final List<String> weights;

    private AnyOf(BigInteger target, List<String> resources, List<String> weights) {
        this.target = target;
        this.resources = resources;
        this.weights = weights;
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
        var moreResources = new ArrayList<>(resources);
        moreResources.add(Resources.withMode(resource));
        var moreWeights = new ArrayList<>(weights);
        moreWeights.add(weight.toString());
        return new AnyOf(target, moreResources, moreWeights);
    }

    String target() { return target.toString(); }

    List<String> resources() { return resources; }

    List<String> weights() { return weights; }
}

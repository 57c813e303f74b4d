package dev.genielock;

import java.util.Arrays;
import java.util.List;

/**
 * Resources with a mode. A resource is {@code exclusive:NAME}, {@code shared:NAME}, {@code 2/10:NAME}, or a NAME without a colon,
 * which is exclusive.
 */
public final class Resources {
    private Resources() {}

    /**
     * Locks a name exclusively.
     *
     * @param name the name
     * @return the resource
     */
    public static String exclusive(String name) { return "exclusive:" + name; }

    /**
     * Shares a name with other shared locks.
     *
     * @param name the name
     * @return the resource
     */
    public static String shared(String name) { return "shared:" + name; }

    /**
     * Locks units of a name. The limit is not declared elsewhere. The server rejects a request unless 1 ≤ units ≤ limit ≤
     * 1,000,000.
     *
     * @param name the name
     * @param units how many units
     * @param limit how many units may be in use at once
     * @return the resource, such as {@code 2/10:licences/cad}
     */
    public static String units(String name, int units, int limit) { return units + "/" + limit + ":" + name; }

    /**
     * Locks all names exclusively that begin with a prefix, existing and future ones. {@code shared("accounts/**")} is the shared
     * lock.
     *
     * @param prefix ends with a slash, which is added if it is missing; the empty prefix stands for all names
     * @return the resource, such as {@code exclusive:accounts/**}
     */
    public static String subtree(String prefix) {
        return exclusive(prefix + (prefix.isEmpty() || prefix.endsWith("/") ? "**" : "/**"));
    }

    /** Returns the resources as on the wire. */
    static List<String> withModes(String... resources) { return Arrays.stream(resources).map(Resources::withMode).toList(); }

    /** Returns the resource as on the wire. */
    static String withMode(String resource) { return resource.indexOf(':') < 0 ? exclusive(resource) : resource; }

    /** Returns the name of a resource with a mode. */
    static String name(String resource) { return resource.substring(resource.indexOf(':') + 1); }
}

package dev.genielock;

import java.util.LinkedHashMap;
import java.util.Map;

/** Selects the requests that {@link GenieClient#inspect} lists: all that match every filter. Immutable. */
public final class InspectQuery {
    private static final InspectQuery ALL = new InspectQuery(Map.of());

    private final Map<String, Object> fields;

    private InspectQuery(Map<String, Object> fields) { this.fields = fields; }

    private InspectQuery with(String name, Object value) {
        var copy = new LinkedHashMap<>(fields);
        copy.put(name, value);
        return new InspectQuery(copy);
    }

    /** {@return the query that matches all requests} */
    public static InspectQuery all() { return ALL; }

    /**
     * Selects the requests for a resource.
     *
     * @param name a name without a mode; {@code accounts/**} matches all names below it
     * @return the query
     */
    public InspectQuery resource(String name) { return with("resource", name); }

    /**
     * Selects the requests of a transaction.
     *
     * @param name the name of the transaction
     * @return the query
     */
    public InspectQuery transaction(String name) { return with("transactionName", name); }

    /**
     * Selects one request.
     *
     * @param id its id
     * @return the query
     */
    public InspectQuery id(long id) { return with("id", id); }

    /**
     * Limits the number of rows.
     *
     * @param rows 1 to 1,000; 100 by default
     * @return the query
     */
    public InspectQuery limit(int rows) { return with("limit", (long) rows); }

    /** {@return the query for held locks only} */
    public InspectQuery onlyHolders() { return with("only", "holders"); }

    /** {@return the query for waiting requests only} */
    public InspectQuery onlyQueue() { return with("only", "queue"); }

    Map<String, Object> fields() { return fields; }
}

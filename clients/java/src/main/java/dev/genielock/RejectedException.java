package dev.genielock;

/**
 * The server has rejected a command, which had no effect. The client itself rejects commands that it cannot send, with the code
 * {@code bad-request}.
 */
public final class RejectedException extends GenieException {
    private static final long serialVersionUID = 1L;

    /** As returned. */
    private final String code;
    /** The text of the server. */
    private final String detail;
    /** The address of the leader, if a follower has rejected the command; or empty. */
    private final String leader;

    RejectedException(String code, String detail, String leader) {
        super(code + ": " + detail, null);
        this.code = code;
        this.detail = detail;
        this.leader = leader;
    }

    static RejectedException badRequest(String detail) { return new RejectedException("bad-request", detail, ""); }

    /** {@return the code, such as {@code bad-request} or {@code unauthorized}} */
    public String code() { return code; }

    String leader() { return leader; }

    /** Returns whether the same server would reject this client again. */
    boolean isFinal() {
        return code.equals("unauthorized") || code.equals("unknown-namespace") || code.equals("unsupported-protocol");
    }
}

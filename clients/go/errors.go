package genie

import (
	"cmp"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"time"
)

// Errors for errors.Is. Where a type of the same meaning exists, errors.As gives its details.
var (
	// ErrClosed: the client was closed.
	ErrClosed = errors.New("genie: the client is closed")
	// ErrUnavailable: no leader answered in time. Either the command was not executed, or the client
	// releases the request as soon as a server can be reached.
	ErrUnavailable = errors.New("genie: no server is available")
	// ErrQueueTimeout: the request was not granted in time. Details: *QueueTimeoutError.
	ErrQueueTimeout = errors.New("genie: not granted in time")
	// ErrDeadlock: the request would have closed a cycle. Details: *DeadlockError.
	ErrDeadlock = errors.New("genie: deadlock")
	// ErrInsufficient: the free resources do not reach the target. Details: *InsufficientError.
	ErrInsufficient = errors.New("genie: not enough free resources")
	// ErrLockLost: a granted lock ended without Release. Details: *LostError.
	ErrLockLost = errors.New("genie: the lock was lost")
	// ErrTransactionTimeout: the lock was lost because its transaction timeout passed. Such an error is
	// an ErrLockLost, too.
	ErrTransactionTimeout = errors.New("genie: the transaction timeout passed")
	// ErrReleased: the lock was released before, by this client.
	ErrReleased = errors.New("genie: the lock was released")
	// ErrDetached: the lock was detached: use Client.ExtendID and Client.ReleaseID.
	ErrDetached = errors.New("genie: the lock was detached")
)

// Blocker is a request that blocks another one: it holds Resource, or is ahead in the queue.
type Blocker struct {
	ID          int64     `json:"id"`
	Resource    string    `json:"resource"`        // the name, without a mode
	Mode        string    `json:"mode"`            // "shared", "exclusive" or "units"
	Units       int       `json:"units,omitempty"` // the units that it holds or waits for, if the mode is "units"
	Of          int       `json:"of,omitempty"`    // the limit of the units
	State       string    `json:"state"`           // "held" or "queued"
	Since       time.Time `json:"since"`
	Transaction string    `json:"transactionName,omitempty"`
	Note        string    `json:"note,omitempty"`
	Traceparent string    `json:"traceparent,omitempty"`
}

func (b Blocker) String() string {
	text := fmt.Sprint(b.ID)
	if b.Transaction != "" {
		text += fmt.Sprintf(" of %q", b.Transaction)
	}
	if b.Note != "" {
		text += fmt.Sprintf(" (%s)", b.Note)
	}
	verb := map[string]string{"held": "holds", "queued": "waits for"}[b.State]
	mode := b.Mode
	if b.Units > 0 {
		mode = fmt.Sprintf("%d/%d", b.Units, b.Of)
	}
	return fmt.Sprintf("%s %s %s:%s", text, verb, mode, b.Resource)
}

// QueueTimeoutError reports that a request was not granted within its queue timeout.
type QueueTimeoutError struct {
	ID            int64
	Waited        time.Duration
	Blockers      []Blocker // the first ten
	BlockersTotal int       // above 1,000 a lower bound
}

func (e *QueueTimeoutError) Error() string {
	text := fmt.Sprintf("genie: request %d was not granted within %v", e.ID, e.Waited)
	for i, blocker := range e.Blockers {
		text += [2]string{": ", ", "}[min(i, 1)] + blocker.String()
	}
	if rest := e.BlockersTotal - len(e.Blockers); rest > 0 {
		text += fmt.Sprintf(" and %d more", rest)
	}
	return text
}

// Is reports whether target is ErrQueueTimeout.
func (e *QueueTimeoutError) Is(target error) bool { return target == ErrQueueTimeout }

// Timeout reports true, like the method of a net.Error.
func (e *QueueTimeoutError) Timeout() bool { return true }

// WaitEdge is an edge of a deadlock's cycle: the request Waiter waits for Resource, which the request Holder holds.
type WaitEdge struct {
	Resource       string
	Waiter, Holder int64
	Units, Of      int    // what Waiter waits for: units and their limit; 0: it does not wait for units
	Note           string // of the waiter, as its Traceparent
	Traceparent    string
}

// String returns what Waiter waits for: the name of the resource, for units as in "2/10:NAME".
func (w WaitEdge) String() string {
	if w.Units == 0 {
		return w.Resource
	}
	return fmt.Sprintf("%d/%d:%s", w.Units, w.Of, w.Resource)
}

// DeadlockError reports that a request would have waited in a cycle. Release the locks of the
// transaction, undo its work, wait for a random time and start over.
type DeadlockError struct {
	ID    int64
	Cycle []string   // transactions: each waits for the next, the last one for the first
	Waits []WaitEdge // the edges of the cycle
}

func (e *DeadlockError) Error() string {
	closed := append(e.Cycle[:len(e.Cycle):len(e.Cycle)], e.Cycle[:min(1, len(e.Cycle))]...) // ends with the first
	text := strings.Join(closed, " → ")
	if len(e.Cycle) > 0 && len(e.Waits) == len(e.Cycle) {
		steps := make([]string, len(e.Waits))
		for i, wait := range e.Waits {
			steps[i] = wait.String() + " of " + closed[i+1]
		}
		text = closed[0] + " would wait for " + strings.Join(steps, ", which waits for ")
	}
	return fmt.Sprintf("genie: request %d would deadlock: %s", e.ID, text)
}

// Is reports whether target is ErrDeadlock.
func (e *DeadlockError) Is(target error) bool { return target == ErrDeadlock }

// InsufficientError reports that AcquireAny locked nothing. Free and Locked are the sums of the
// weights of the free resources and of the others.
type InsufficientError struct {
	ID           int64
	Free, Locked *big.Int
}

func (e *InsufficientError) Error() string {
	return fmt.Sprintf("genie: request %d locked nothing: %v is free, %v is locked by others", e.ID, e.Free, e.Locked)
}

// Is reports whether target is ErrInsufficient.
func (e *InsufficientError) Is(target error) bool { return target == ErrInsufficient }

// LostError reports that a granted lock ended without Release. Other clients may hold it now: undo the
// work that it protected.
type LostError struct {
	ID int64
	// Reason is the server's reason, such as "transaction-timeout", "disconnected", or "success" (the
	// lock was released by its id); "lost" if the server does not know the lock any more.
	Reason string
	// Err is the error of the function of Do whose lock was lost, ErrClosed if the client was closed, or nil.
	Err error
}

var lostReasons = map[string]string{
	reasonTransactionTimeout: "it was held for longer than its transaction timeout",
	reasonDisconnected:       "its session ended",
	reasonSuccess:            "it was released by its id",
	reasonLost:               "the server does not know it any more",
}

func (e *LostError) Error() string {
	reason := cmp.Or(lostReasons[e.Reason], e.Reason)
	if e.Err != nil {
		reason += " (" + e.Err.Error() + ")"
	}
	return fmt.Sprintf("genie: lock %d was lost: %s", e.ID, reason)
}

// Is reports whether target is ErrLockLost or, after a timeout, ErrTransactionTimeout.
func (e *LostError) Is(target error) bool {
	return target == ErrLockLost || target == ErrTransactionTimeout && e.Reason == reasonTransactionTimeout
}

func (e *LostError) Unwrap() error { return e.Err }

// EndedError reports that a waiting request ended for a reason that has no type of its own, for
// example because another client released it by its id ("success").
type EndedError struct {
	ID     int64
	Reason string
}

func (e *EndedError) Error() string {
	return fmt.Sprintf("genie: request %d ended before it was granted: %s", e.ID, e.Reason)
}

// RejectedError reports that the server rejected a command, which had no effect. The client itself rejects commands
// that it cannot send, with the code "bad-request".
type RejectedError struct {
	Code    string // such as "bad-request" or "unauthorized"
	Message string
	leader  string // the address of the leader, if a follower has rejected the command
}

func (e *RejectedError) Error() string { return "genie: " + e.Code + ": " + e.Message }

// isFinal reports whether the same server would reject this client again.
func (e *RejectedError) isFinal() bool {
	return e.Code == "unauthorized" || e.Code == "unknown-namespace" || e.Code == "unsupported-protocol"
}

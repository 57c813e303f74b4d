package genie

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"sort"
	"strconv"
	"time"
)

// The session of a client across its connections: which commands wait for an answer, and which locks are held.
//
// Every command has a ref, and its answers have the same ref. The ref of a request identifies
// the request until it ends. A connection begins with `hello` and `ping`; the answers are `welcome`, the
// state of the session's requests, and `pong`. Then the client sends all commands without an answer
// again, in their first order, with the same refs: the server executes each of them once.

const (
	helloRef = "hello"
	pingRef  = "resume" // of the ping after `hello`

	maxUnsent = 1 << 20 // bytes that may wait to be sent; new calls wait beyond it
	maxInline = 4 << 10 // bytes of a command that its caller writes to the connection

	minTimer = 10 * time.Millisecond // bounds the cost of the scans of all calls for those that are overdue

	// If more than this part of its transaction timeout may have passed when a grant arrives, the lock is extended first.
	maxPassedShare = 4
)

// call is a command without an answer.
type call struct {
	name       string // of the command; "cancel": a release by the ref of the request
	fields     *fields
	line       []byte
	order      uint64 // of the first sending, among all commands
	lock       *Lock  // of a request, an extend and most releases
	watch      *Watch // of a watch
	background bool   // nobody waits: it is not sent again on another connection, unless it is a release
	sentAt     time.Time
	firstAt    time.Time     // when it was sent for the first time in this session of the server; zero: it was not sent
	retries    int           // after the error `unavailable`
	id         int64         // of a cancel: the lock that was granted nevertheless
	deadline   time.Time     // when its callers give up
	overdue    chan struct{} // closed at the deadline; nil: no caller waits
	done       chan struct{}
	answer     *message
	err        error
}

func (c *Client) newCall(name string, f *fields, l *Lock) *call {
	f.Ref = strconv.FormatUint(c.refs.Add(1), 10)
	return &call{name: name, fields: f, line: encode(name, f), lock: l, done: make(chan struct{})}
}

// do sends a command and waits for its answer.
func (c *Client) do(ctx context.Context, name string, f *fields, l *Lock, timeout time.Duration) (*message, error) {
	r := c.newCall(name, f, l)
	if err := f.check(r.line); err != nil {
		return nil, err
	}
	c.mu.Lock()
	err := c.admit(ctx)
	if err != nil {
		c.mu.Unlock()
		return nil, err
	}
	c.send(r)
	err = c.wait(ctx, r, timeout)
	return r.answer, err
}

// wait waits for the answer of a call. Called with Client.mu held, which it releases.
func (c *Client) wait(ctx context.Context, r *call, timeout time.Duration) error {
	if r.overdue == nil {
		r.overdue = make(chan struct{})
	}
	overdue := r.overdue
	r.deadline = time.Now().Add(timeout)
	c.setTimer(r.deadline)
	c.mu.Unlock()
	select {
	case <-r.done:
		return r.err
	case <-overdue:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls[r.fields.Ref] != r { // answered meanwhile
		return r.err
	}
	c.abandon(r)
	if err := ctx.Err(); err != nil {
		return err
	}
	return c.unavailable()
}

// The rest is called with Client.mu held.

// setTimer sets the timer of all callers for a deadline, unless it is set for an earlier one. A timer for each caller would
// cost more than the rest of its call.
func (c *Client) setTimer(deadline time.Time) {
	if c.timerAt.IsZero() || deadline.Before(c.timerAt) {
		c.timerAt = deadline
		c.timer.Reset(max(time.Until(deadline), minTimer))
	}
}

// onTimer wakes the callers whose deadline has passed.
func (c *Client) onTimer() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.timerAt = time.Time{}
	for _, r := range c.calls {
		if r.overdue == nil {
			continue
		} else if time.Now().Before(r.deadline) {
			c.setTimer(r.deadline)
		} else {
			close(r.overdue)
			r.overdue = nil
		}
	}
}

// admit returns an error if no call is possible. It waits while too many bytes are unsent.
func (c *Client) admit(ctx context.Context) error {
	for c.closed == nil && ctx.Err() == nil && len(c.output) > maxUnsent {
		taken := c.outputTaken
		c.mu.Unlock()
		select {
		case <-taken:
		case <-ctx.Done():
		}
		c.mu.Lock()
	}
	if c.closed != nil {
		return c.closed
	}
	return ctx.Err()
}

// unavailable returns the error for a caller that no server has answered in time.
func (c *Client) unavailable() error {
	if c.conn != nil {
		return fmt.Errorf("%w: %v does not answer", ErrUnavailable, c.conn.address)
	}
	return fmt.Errorf("%w: %v", ErrUnavailable, c.lastFailure)
}

// log logs without the mutex.
func (c *Client) log(format string, arguments ...any) {
	c.mu.Unlock()
	defer c.mu.Lock()
	c.config.Logf("genie: "+format, arguments...)
}

// send registers a call and sends it, now or on the next connection.
func (c *Client) send(r *call) {
	c.lastOrder++
	r.order = c.lastOrder
	c.calls[r.fields.Ref] = r
	if c.conn != nil {
		c.write(r)
	}
}

// sendBackground sends a command for whose answer nobody waits.
func (c *Client) sendBackground(name string, f *fields, l *Lock) *call {
	r := c.newCall(name, f, l)
	r.background = true
	c.send(r)
	return r
}

func (c *Client) write(r *call) {
	r.sentAt = time.Now()
	if r.firstAt.IsZero() {
		r.firstAt = r.sentAt
	}
	if len(c.calls) == 1 && len(c.output) == 0 && len(r.line) <= maxInline {
		// This saves a switch of goroutines. It cannot block: the server has answered, so it has read, all earlier commands.
		if _, err := c.conn.Write(r.line); err != nil {
			c.conn.close() // the reader handles the end of the connection
		}
		return
	}
	c.output = append(c.output, r.line...)
	c.outputAdded.Signal()
}

// finish ends a call, and wakes its caller.
func (c *Client) finish(r *call, err error) {
	delete(c.calls, r.fields.Ref)
	r.err = err
	close(r.done)
}

// abandon gives up a call whose caller does not wait any longer.
func (c *Client) abandon(r *call) {
	if r.name == "request" {
		delete(c.calls, r.fields.Ref)
		c.cancelRequest(r)
	} else {
		r.background = true // an extend that was sent may still change the lock
	}
}

// cancelRequest cancels a request that is no longer in Client.calls.
func (c *Client) cancelRequest(r *call) {
	if !r.firstAt.IsZero() {
		f := &fields{Ref: r.fields.Ref}
		c.send(&call{name: "cancel", fields: f, line: encode("release", f), done: make(chan struct{})})
	}
}

// shut ends all locks, calls and watches, because the client is closed.
func (c *Client) shut(err error) {
	if c.closed == nil {
		c.closed = err
	}
	for w := range c.watches {
		w.end(c.closed)
	}
	for ref, l := range c.locks {
		delete(c.locks, ref)
		l.end(&LostError{ID: l.id, Reason: "the client does not manage it any more", Err: c.closed})
	}
	for _, r := range c.calls {
		c.finish(r, c.closed)
	}
}

// resume completes the handshake: the server has sent the state of all requests of the session.
func (c *Client) resume(conn *conn) {
	for _, l := range c.locks {
		switch {
		case l.confirmedOn != conn && l.release == nil: // it is lost: the answer to a release contains the reason
			l.sendRelease()
			if !conn.resumed {
				l.lose(reasonLost)
			}
		case l.confirmedOn == conn && l.err == nil && l.request.watchdog: // the last extension may have been lost
			l.renewAt = time.Now()
			l.setTimer()
		}
	}
	calls := make([]*call, 0, len(c.calls))
	for _, r := range c.calls {
		calls = append(calls, r)
	}
	sort.Slice(calls, func(i, j int) bool { return calls[i].order < calls[j].order })
	c.conn, conn.upAt = conn, time.Now()
	for _, r := range calls {
		c.sendAgain(conn, r)
	}
	for w := range c.watches {
		w.request()
	}
}

// sendAgain sends a command without an answer on a new connection, unless it has become useless.
func (c *Client) sendAgain(conn *conn, r *call) {
	switch {
	case r.background && r.name != "release":
		c.finish(r, nil)
	case r.name == "extend" && r.lock.err != nil:
		c.finish(r, r.lock.err)
	case r.name == "cancel" && !conn.resumed: // the new session does not know the ref
		c.finish(r, nil)
		if r.id != 0 {
			c.sendBackground("release", &fields{ID: r.id}, nil)
		}
	case r.name == "request" && !conn.resumed && !r.firstAt.IsZero(): // it is queued again, for the rest of its time
		if request := r.lock.request; request.queueTimeout < maxTimeout && r.fields.QueueTimeout != nil {
			request.queueTimeout = max(0, request.queueTimeout-time.Since(r.firstAt))
			r.fields.QueueTimeout = toMS(request.queueTimeout)
			r.line = encode(r.name, r.fields)
		}
		r.firstAt = time.Time{}
		c.write(r)
	default:
		c.write(r)
	}
}

// handle handles a message of the server. An error means that the connection must be closed.
func (c *Client) handle(conn *conn, m *message) error {
	p := &m.Payload
	switch {
	case m.Command == "error" && (c.conn != conn || p.Code == "unavailable" && p.Leader != ""):
		return &RejectedError{p.Code, p.Message, p.Leader}
	case m.Command == "welcome":
		if namespace := c.config.Namespace; p.Protocol != protocolVersion || namespace != "" && p.Namespace != namespace {
			return fmt.Errorf("the server speaks protocol %d and serves the namespace %q", p.Protocol, p.Namespace)
		}
		conn.welcomed, conn.resumed = true, p.Resumed
		if interval := fromMS(p.PingInterval); interval > 0 {
			conn.pingInterval = min(max(interval, minPingInterval), c.config.ConnectTimeout/2)
		}
		return nil
	case m.Command == "pong" && c.conn != conn && conn.welcomed:
		c.resume(conn)
		return nil
	case m.Command == "event":
		c.onEvent(&Change{p.State, p.Resource, p.Mode, p.ID, p.TransactionName})
		return nil
	case !knownMessages[m.Command]: // of a newer server, or `queued`, which is not needed
		return nil
	case !conn.welcomed:
		return errors.New("the server did not answer hello")
	}
	conn.answered = conn.answered || c.conn == conn && p.Code != "unavailable"
	r, l := c.calls[p.Ref], c.locks[p.Ref]
	switch {
	case m.Command == "locked":
		c.onLocked(conn, m, r, l)
	case r != nil && m.Command == "error":
		c.onError(conn, r, &RejectedError{Code: p.Code, Message: p.Message})
	case r != nil:
		c.onAnswer(r, m)
	case l != nil && m.Command == "released":
		c.onNotification(l, p.Reason)
	case m.Command == "error":
		c.log("the server answered %s: %s", p.Code, p.Message)
	case m.Command != "released": // an end may be repeated
		c.log("an unexpected %s with the ref %q was ignored", m.Command, p.Ref)
	}
	return nil
}

// onLocked handles the grant of the request r, or the report that the server holds the lock l.
func (c *Client) onLocked(conn *conn, m *message, r *call, l *Lock) {
	p := &m.Payload
	switch {
	case r != nil && r.name == "request":
		l = r.lock
		c.locks[p.Ref] = l
		if l.id, l.fence = p.ID, p.Fence; p.Resources != nil {
			l.choose(p.Resources)
		}
		// The message may be late. But the server granted the lock, or computed expiresIn, after it had received the
		// `hello` of this connection and the request.
		since, timeout := conn.helloAt, l.request.transactionTimeout
		if r.firstAt.After(since) {
			since = r.firstAt
		}
		remaining := timeout
		if p.ExpiresIn != nil {
			remaining = fromMS(*p.ExpiresIn)
		}
		if l.late = time.Until(since.Add(remaining)) < timeout-timeout/maxPassedShare; l.late {
			l.hold(since, NoTimeout) // until the answer to the extension; nobody uses the lock before
		} else {
			l.hold(since, remaining)
		}
		c.finish(r, nil)
	case r != nil: // it was cancelled meanwhile
		r.id = p.ID
		return
	case l == nil: // unless it is released, it stays held until it times out
		c.sendBackground("release", &fields{ID: p.ID}, nil)
		c.log("lock %d is released, because its ref %q is not known", p.ID, p.Ref)
		return
	case l.err == nil && p.ExpiresIn != nil:
		l.hold(conn.helloAt, fromMS(*p.ExpiresIn))
	case l.err != nil && l.release == nil: // it had ended by this client's clock
		l.sendRelease()
	}
	l.confirmedOn = conn
}

// onNotification handles the end of a lock that is no answer to a command of this client.
func (c *Client) onNotification(l *Lock, reason string) {
	if l.release != nil && reason == reasonSuccess {
		return // the answer to the release follows
	}
	delete(c.locks, l.request.fields.Ref)
	l.lose(reason)
	if r := l.release; r != nil && c.calls[r.fields.Ref] == r { // the lock had ended before the server received the release
		c.finish(r, l.err)
	}
}

// onAnswer handles the answer to a command. The answer to a request is its end.
func (c *Client) onAnswer(r *call, m *message) {
	l := r.lock
	switch {
	case r.name == "request":
		c.finish(r, m.notGranted())
	case m.Command == "released" && l != nil:
		c.onEnded(r, m.Payload.Reason)
	case r.name == "extend":
		timeout := fromMS(*r.fields.TransactionTimeout)
		if l.err == nil {
			l.request.transactionTimeout = timeout
			l.hold(r.sentAt, timeout)
		} else if l.release == nil { // it had ended by this client's clock
			l.sendRelease()
		}
		c.finish(r, l.err)
	default:
		r.answer = m
		c.finish(r, nil)
		if r.watch != nil {
			r.watch.onSnapshot(m)
		}
	}
}

// onEnded handles the answer to a release or an extend of a lock that has ended.
func (c *Client) onEnded(r *call, reason string) {
	l := r.lock
	delete(c.locks, l.request.fields.Ref)
	l.lose(reason)
	if r.name == "release" && l.err == ErrReleased {
		c.finish(r, nil)
	} else {
		c.finish(r, l.err)
	}
}

// onError handles an error as the answer to a command.
func (c *Client) onError(conn *conn, r *call, err *RejectedError) {
	switch {
	case err.Code == "unavailable" && (r.name != "ping" || !r.background):
		// The server cannot reach its store. It was not executed: send it again after a wait.
		time.AfterFunc(backoff(r.retries), func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.calls[r.fields.Ref] == r && c.conn == conn {
				c.write(r)
			}
		})
		r.retries++
	case err.Code == "unknown-id" && r.lock != nil && r.name != "request":
		// A release that was sent on an earlier connection may have been executed there.
		if r.name == "release" && r.lock.err == ErrReleased && r.firstAt.Before(conn.helloAt) {
			c.onEnded(r, reasonSuccess)
		} else {
			c.onEnded(r, reasonLost)
		}
	default:
		c.finish(r, err)
		if r.watch != nil {
			r.watch.end(err)
		} else if r.name == "release" && r.lock != nil {
			r.lock.release = nil // Release may be called again
		}
	}
}

func (m *message) notGranted() error {
	p := &m.Payload
	switch p.Reason {
	case "queue-timeout":
		return &QueueTimeoutError{p.ID, fromMS(p.Waited), p.Blockers, max(p.BlockersTotal, len(p.Blockers))}
	case "deadlock":
		return &DeadlockError{p.ID, p.Cycle, p.Waits}
	case "insufficient":
		return &InsufficientError{p.ID, toBig(p.Free), toBig(p.Locked)}
	case reasonTransactionTimeout: // granted and timed out while there was no connection
		return &LostError{ID: p.ID, Reason: p.Reason}
	}
	return &EndedError{p.ID, p.Reason}
}

// backoff returns the wait before an attempt: 50 ms at first, then twice as long each time, at most
// 2 s, each times a random number between 0.5 and 1.
func backoff(attempts int) time.Duration {
	wait := min(50*time.Millisecond<<min(attempts, 10), 2*time.Second)
	return time.Duration(float64(wait) * (0.5 + rand.Float64()/2))
}

func min[T int | time.Duration](a, b T) T {
	if a < b {
		return a
	}
	return b
}

func max[T int | time.Duration](a, b T) T { return -min(-a, -b) }

package genie

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"slices"
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
)

// maxUnknownLocks is the maximum number of unanswered releases of locks that this client has not requested.
const maxUnknownLocks = 1000

// commands are the commands of the answers that are no `locked`, `released` or `error`.
var commands = map[string]string{
	"pong": "ping", "extended": "extend", "inspected": "inspect", "watching": "watch", "unwatched": "unwatch", "bye": "bye",
}

// call is a command without an answer.
type call struct {
	number     uint64 // the order of the commands; also the ref of most
	name       string
	fields     *fields
	line       []byte
	lock       *Lock     // of a request, an extend and most releases
	watch      *Watch    // of a watch
	background bool      // no caller waits: it is not sent again on another connection, unless it is a release or bye
	isGivenUp  bool      // its caller has got an error: it is not repeated, unless it is a release
	sentAt     time.Time // zero: it was not sent. See write
	retries    int       // after the error `unavailable`
	id         int64     // of the release of a cancelled request: the lock that was granted nevertheless
	isUnknown  bool      // a release of a lock that this client has not requested
	query      *call     // of a release by id: the inspect that was sent before it; nil: there is none
	isFollowed bool      // of a release by id: the waiting requests were sent again after it
	done       chan struct{}
	answer     *payload
	err        error
}

// newSecret returns a random text.
func newSecret() string {
	secret := make([]byte, 24)
	if _, err := rand.Read(secret); err != nil {
		panic(err) // the system has no randomness
	}
	return base64.RawURLEncoding.EncodeToString(secret)
}

// hello returns the first two lines of a connection.
func (c *Client) hello(ctx context.Context) ([]byte, error) {
	token, err := c.config.TokenSource(ctx)
	if err != nil {
		return nil, err
	}
	f := &fields{
		Protocol: protocolVersion, Client: clientName, Quiet: true, Token: token, Namespace: c.config.Namespace,
		Session: c.secret, SessionTimeout: toMS(c.config.SessionTimeout), Note: c.note, Ref: helloRef,
	}
	hello := encode("hello", f)
	return append(hello, encode("ping", &fields{Ref: pingRef})...), f.check(hello)
}

// newCall returns a call that was not sent. It has a ref of its own, unless it is the release of a cancelled request.
func (c *Client) newCall(name string, f *fields, l *Lock) *call {
	number := c.lastNumber.Add(1)
	if f.Ref == "" {
		f.Ref = strconv.FormatUint(number, 10)
	}
	return &call{number: number, name: name, fields: f, line: encode(name, f), lock: l, done: make(chan struct{})}
}

// do sends a command and waits for its answer.
func (c *Client) do(ctx context.Context, name string, f *fields, l *Lock, timeout time.Duration) (*payload, error) {
	return c.execute(ctx, c.newCall(name, f, l), timeout)
}

// execute sends the command of a call and waits for its answer.
func (c *Client) execute(ctx context.Context, r *call, timeout time.Duration) (*payload, error) {
	if err := r.fields.check(r.line); err != nil {
		return nil, err
	}
	start := time.Now()
	if err := c.submit(ctx, r, timeout); err != nil {
		return nil, err
	}
	return c.wait(ctx, r, timeout-time.Since(start))
}

// submit sends a command. While too many bytes are unsent, it waits, at most for a timeout.
func (c *Client) submit(ctx context.Context, r *call, timeout time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var timedOut <-chan time.Time
	for c.closed == nil && ctx.Err() == nil && c.conn != nil && len(c.conn.output) > maxUnsent {
		if timedOut == nil {
			timedOut = time.After(timeout)
		}
		taken, isLate := c.conn.outputTaken, false
		c.mu.Unlock()
		select {
		case <-taken:
		case <-ctx.Done():
		case <-timedOut:
			isLate = true
		}
		c.mu.Lock()
		if isLate {
			return fmt.Errorf("%w: %w", ErrUnavailable, c.lastFailure)
		}
	}
	if c.closed != nil {
		return c.closed
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if r.name == "release" && r.lock != nil { // by its id: the server may grant the lock to another client before the answer arrives
		r.lock.end(r.lock.lost(reasonSuccess))
	}
	c.send(r)
	return nil
}

// wait waits for the answer to a call.
func (c *Client) wait(ctx context.Context, r *call, timeout time.Duration) (*payload, error) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-r.done:
		return r.answer, r.err
	case <-timer.C:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls[r.fields.Ref] != r { // answered meanwhile
		return r.answer, r.err
	}
	err := ctx.Err()
	if err == nil {
		err = fmt.Errorf("%w: %w", ErrUnavailable, c.lastFailure)
	}
	c.abandon(r, err)
	return nil, err
}

// The rest is called with Client.mu held.

// warn logs a warning without the mutex, because the logger may be slow.
func (c *Client) warn(message string, arguments ...any) {
	c.mu.Unlock()
	defer c.mu.Lock()
	c.config.Logger.Warn("genie: "+message, arguments...)
}

// send registers a call and sends it, now or on the next connection.
func (c *Client) send(r *call) {
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

// write sends a call on the connection. If the server answers it there, it has not executed it before r.sentAt.
func (c *Client) write(r *call) {
	conn := c.conn
	isSent := r.sentAt.After(conn.helloAt) // and was answered with `unavailable`
	switch {
	case isSent && r.name == "request": // the server may have executed it before it has rejected a repetition
	case isSent || r.sentAt.IsZero():
		r.sentAt = time.Now()
	default: // it was sent on an earlier connection, and may be answered from now on
		r.sentAt = conn.helloAt
	}
	if r.name == "extend" && r.lock != nil {
		r.lock.lastExtend = r
		r.lock.shorten(r)
	}
	r.isFollowed = false
	c.enqueue(r)
}

// enqueue writes the line of a call on the connection, now or soon.
func (c *Client) enqueue(r *call) {
	conn := c.conn
	if len(c.calls) == 1 && len(conn.output) == 0 && len(r.line) <= maxInline {
		// This saves a switch of goroutines. It cannot block: the server has answered, so it has read, all earlier commands.
		_ = conn.send(r.line)
		return
	}
	if len(conn.output) == 0 {
		conn.outputAdded <- struct{}{} // does not wait: there was one value for the output that was taken
	}
	conn.output = append(conn.output, r.line...)
}

// finish ends a call, unless it has ended before, and wakes its caller.
func (c *Client) finish(r *call, err error) {
	if r != nil && c.calls[r.fields.Ref] == r {
		delete(c.calls, r.fields.Ref)
		if r.isUnknown {
			c.unknownLocks--
		}
		r.err = err
		close(r.done)
	}
}

// abandon gives up a call, whose caller gets the error.
func (c *Client) abandon(r *call, err error) {
	isRequest := r.name == "request"
	if r.name == "release" || !isRequest && c.conn != nil {
		r.background, r.isGivenUp = true, true // an extend that was sent may still change the lock
		return
	}
	c.finish(r, err) // without a connection, nothing would remove it before the next one
	if isRequest && !r.sentAt.IsZero() {
		c.sendBackground("release", &fields{Ref: r.fields.Ref}, nil)
	}
}

// abandonRequests cancels the waiting requests, whose callers get the error.
func (c *Client) abandonRequests(err error) {
	for _, r := range c.calls {
		if r.name == "request" {
			c.abandon(r, err)
		}
	}
}

// hasRequests returns whether any request waits.
func (c *Client) hasRequests() bool {
	for _, r := range c.calls {
		if r.name == "request" {
			return true
		}
	}
	return false
}

// shut ends all locks, calls and watches, because the client is closed.
func (c *Client) shut(err error) {
	if c.closed == nil {
		c.closed = err
	}
	for w := range c.watches {
		w.end(c.closed)
	}
	for id, l := range c.locks {
		delete(c.locks, id)
		l.end(l.lostByClose(c.closed))
	}
	for _, r := range c.calls {
		c.finish(r, c.closed)
	}
}

// resume completes the handshake: the server has sent the state of all requests of the session.
func (c *Client) resume(conn *conn) {
	c.renewLease(conn.helloAt)
	conn.timer.Reset(conn.pingInterval)
	c.finish(c.calls[pingRef], nil) // of Dial
	for _, l := range c.locks {
		l.onResumed(conn)
	}
	calls := slices.SortedFunc(maps.Values(c.calls), func(a, b *call) int { return cmp.Compare(a.number, b.number) })
	c.conn, c.isEntered = conn, true
	c.lastFailure = fmt.Errorf("%s does not answer", conn.address)
	go conn.writeOutput()
	for _, r := range calls {
		c.sendAgain(r)
	}
	for w := range c.watches {
		w.request()
	}
}

// sendAgain sends a command without an answer on a new connection, unless it has become useless.
func (c *Client) sendAgain(r *call) {
	isNewSession := !c.conn.resumed
	switch {
	case r.background && r.name != "release" && r.name != "bye":
		c.finish(r, nil)
	case r.name == "extend" && r.lock != nil && r.lock.err != nil:
		c.finish(r, r.lock.err)
	case isNewSession && r.name == "release" && r.fields.ID == 0: // the server does not know the ref of the cancelled request
		c.finish(r, nil)
		if r.id != 0 {
			c.sendBackground("release", &fields{ID: r.id}, nil)
		}
	case isNewSession && r.name == "request" && !r.sentAt.IsZero(): // it is queued again, for the rest of its time
		if timeout := *r.fields.QueueTimeout; timeout < maxTimeoutMS {
			rest := max(0, timeout-*toMS(time.Since(r.sentAt)))
			r.fields.QueueTimeout = &rest
			r.line = encode(r.name, r.fields)
		}
		r.sentAt = time.Time{}
		c.write(r)
	default:
		c.write(r)
	}
}

// disconnect handles the end of the connection.
func (c *Client) disconnect() {
	conn := c.conn
	c.conn = nil
	if time.Since(conn.helloAt) >= stableAfter {
		c.failedRounds = 0
	}
	conn.takeOutput() // its commands are sent again
	for w := range c.watches {
		w.isLive, w.call = false, nil
	}
}

// renewLease notes that the server has executed a command that was sent at this time, so that it keeps the session for
// SessionTimeout after it.
func (c *Client) renewLease(sentAt time.Time) {
	if sentAt.After(c.leaseFrom) {
		c.leaseFrom = sentAt
	}
}

// receive handles a message of the server. An error means that the connection must be closed.
func (c *Client) receive(conn *conn, m *message) error {
	p := &m.Payload
	c.mu.Lock()
	defer c.mu.Unlock()
	isUp, r := c.conn == conn, c.calls[p.Ref]
	if r != nil {
		c.renewLease(r.sentAt)
	}
	if isUp && p.Code != "unavailable" { // the server executes commands
		c.failedRounds = 0
	}
	switch m.Command {
	case "locked":
		return c.onLocked(conn, r, p)
	case "released":
		c.onReleased(r, p)
	case "error":
		if !isUp || p.Code == "unavailable" && p.Leader != "" || p.Code == codeTakenOver && p.Ref == "" {
			return p.rejection()
		}
		c.onError(conn, r, p.rejection())
	case "event":
		for w := range c.watches {
			w.onEvent(p.Change)
		}
	case "pong", "extended", "inspected", "watching", "unwatched", "bye":
		c.onAnswer(conn, r, m)
	} // other messages are `queued`, which is not needed, or those of a newer server
	return nil
}

// onLocked handles the grant of a request, or the report that a lock is held. It returns an error if the server has sent too
// many locks that were not requested, and has not answered their releases.
func (c *Client) onLocked(conn *conn, r *call, p *payload) error {
	l := c.locks[p.ID]
	switch {
	case p.ID == 0 || p.Fence == 0:
		return errors.New("the server sent a lock without an id or a fence")
	case r != nil && r.name == "request":
		r.lock.onGranted(conn, r, p)
	case r != nil: // the request was cancelled meanwhile
		r.id = p.ID
	case l != nil:
		l.onReported(conn, p)
	case c.unknownLocks >= maxUnknownLocks:
		return fmt.Errorf("the server sent more than %d locks that were not requested", maxUnknownLocks)
	default: // unless it is released, it stays held until it times out
		c.unknownLocks++
		c.sendBackground("release", &fields{ID: p.ID}, nil).isUnknown = true
		c.warn("a lock is released, because its ref is not known", "id", p.ID, "ref", p.Ref)
	}
	return nil
}

// onReleased handles the end of a request or of a lock, as a notification or as the answer to a command.
func (c *Client) onReleased(r *call, p *payload) {
	l := c.locks[p.ID]
	switch {
	case r != nil && r.name == "request":
		c.finish(r, p.notGranted())
	case r != nil && r.lock != nil:
		r.lock.onEnded(r, p.Reason)
	case r != nil && (r.name == "release" || r.name == "extend"):
		r.answer = p
		c.finish(r, nil)
		if l != nil { // it is detached, or was granted after the call by its id was sent
			l.onEnded(nil, p.Reason)
		} else if r.name == "release" && r.fields.ID != 0 && !r.isUnknown && !r.isFollowed && !r.isNotQueued() {
			c.repeatRequests()
		}
	case l != nil:
		l.onEnded(nil, p.Reason)
	} // otherwise it is repeated
}

// isNotQueued returns whether the request that a call has released did certainly not wait.
func (r *call) isNotQueued() bool {
	return r.query != nil && r.query.answer != nil && r.query.answer.QueueTotal == 0
}

// repeatRequests sends the waiting requests again. This client does not know their ids, and the server does not notify a client of
// the end of a request that the client itself has released. The answer to the repetition is the end. It also follows the releases
// that were sent before, so thousands of them do not each repeat thousands of requests.
func (c *Client) repeatRequests() {
	for _, r := range c.calls {
		if c.conn != nil && r.name == "request" && !r.sentAt.IsZero() {
			c.enqueue(r) // without a new sentAt: the request may have been granted before
		}
		r.isFollowed = true
	}
}

// onAnswer handles any other answer to a command.
func (c *Client) onAnswer(conn *conn, r *call, m *message) {
	p := &m.Payload
	switch {
	case c.conn != conn: // the answer to the ping after `hello`
		c.resume(conn)
		c.mu.Unlock()
		defer c.mu.Lock()
		c.emitUp(conn.address)
	case r == nil || r.name != commands[m.Command]: // a request was not granted by it
		c.warn("an answer was ignored, because no such command has its ref", "command", m.Command, "ref", p.Ref)
	case r.name == "extend" && r.lock != nil:
		r.lock.onExtended(r)
	default:
		r.answer = p
		c.finish(r, nil)
		if r.watch != nil {
			r.watch.onSnapshot(r)
		}
	}
}

// onError handles an error as the answer to a command.
func (c *Client) onError(conn *conn, r *call, err *RejectedError) {
	switch {
	case r == nil:
		c.warn("the server sent an error", "code", err.Code, "message", err.Message)
	case err.Code == "unavailable" && (!r.isGivenUp || r.name == "release"): // the server cannot reach its store, and has not executed the command
		time.AfterFunc(backoff(r.retries), func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.calls[r.fields.Ref] == r && c.conn == conn {
				c.write(r)
			}
		})
		r.retries++
	case err.Code == "unknown-id" && r.lock != nil && r.name != "request":
		reason := reasonLost
		if r.name == "release" && r.lock.err == ErrReleased && !r.sentAt.After(conn.helloAt) {
			reason = reasonSuccess // it may have been executed on an earlier connection
		}
		r.lock.onEnded(r, reason)
	default:
		c.finish(r, err)
		if r.watch != nil {
			r.watch.end(err)
		} else if r.name == "release" && r.lock != nil {
			r.lock.release = nil // Release may be called again
		}
	}
}

// backoff returns the wait before an attempt: the greatest one, times a random number between 0.5 and 1.
func backoff(attempts int) time.Duration {
	return time.Duration(float64(maxBackoff(attempts)) * (0.5 + mathrand.Float64()/2))
}

// maxBackoff returns 50 ms at first, then twice as long each time, at most 2 s.
func maxBackoff(attempts int) time.Duration {
	return min(50*time.Millisecond<<min(attempts, 10), 2*time.Second)
}

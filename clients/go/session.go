package genie

import (
	"errors"
	"fmt"
	"math"
	"math/rand"
	"sort"
	"time"
)

// session is the state of a client across its connections, without sockets and without a clock: commands
// and received lines come in; encoded commands and timers come out. `now` is the time since the start of
// the client. Client.mu protects all of it.
//
// Every command has a ref, a number, and its answers have the same ref. The ref of a request identifies
// the request until it ends. A connection begins with `hello` and `ping`; the answers are `welcome`, the
// state of the session's requests, and `pong`. Then the session sends all commands without an answer
// again, in their first order, with the same refs: the server executes each of them once.
type session struct {
	config *Config
	phase  phase
	out    []byte // encoded commands, to be written to the connection

	counter    uint64           // the last ref
	locks      map[uint64]*Lock // requests that wait, are held or are being released, by ref
	pending    map[uint64]*call // other commands without an answer, by ref
	watches    map[*Watch]bool  // the open watches
	unanswered int              // locks that wait for their first answer
	connection int              // the number of the connection
	helloAt    time.Duration

	closeReason string // why the connection must be closed
	answered    bool   // whether the server has answered a command on this connection
	redirect    string // the leader's address that a follower named
	anyAnswer   bool   // whether any server has answered at all
	rejection   *RejectedError
	closed      error // why the client is closed; nil: it is open

	nextTimer    time.Duration
	retryAt      time.Duration // when commands that were answered with `unavailable` are sent again
	retries      backoff
	keepalive    bool // whether the ping timer runs
	lastMessage  time.Duration
	pingInterval time.Duration
	pingStep     time.Duration // a third of the time that a server has to answer a ping
	pingSteps    int           // steps since the last ping; 0: no answer is awaited
	pingStepAt   time.Duration
}

type phase uint8

const (
	down      phase = iota
	handshake       // `hello` was sent
	resuming        // the server sends the state of the session's requests
	up
)

const never = time.Duration(math.MaxInt64)

type kind uint8

const (
	releaseCall kind = iota
	extendCall
	inspectCall
	pingCall
	watchCall
	unwatchCall
	byeCall
)

// call is a command other than `request`.
type call struct {
	kind      kind
	ref       uint64
	order     uint64 // of the first sending, among all commands
	lock      *Lock  // of a release or an extend; nil: the request is not known here
	id        int64  // of the lock; 0: the release names the request by its ref
	timeout   time.Duration
	query     *Query
	watch     *Watch
	prefix    string
	sentAt    time.Duration // the last time; 0: never
	deadline  time.Duration // when the caller gives up; 0: no caller waits
	resent    bool          // the server may have executed an earlier copy
	refused   bool          // answered with `unavailable`: must be sent again
	abandoned bool          // no caller waits for the answer
	done      chan struct{} // closed when the call ends; nil: no caller ever waits
	result    *Inspection
	err       error
}

func newSession(config *Config) *session {
	s := &session{
		config: config, locks: map[uint64]*Lock{}, pending: map[uint64]*call{}, watches: map[*Watch]bool{},
		nextTimer: never, retryAt: never,
	}
	s.setPingInterval(2 * time.Second)
	s.pingStep = min(time.Second, config.ConnectTimeout/4)
	return s
}

// -- commands ----------------------------------------------------------------------------------------

// request adds a new request and sends it, now or on the next connection.
func (s *session) request(l *Lock, now time.Duration) {
	s.counter++
	l.ref = s.counter
	l.deadline = after(now, l.options.queueTimeout, s.config.ConnectTimeout)
	s.locks[l.ref] = l
	s.setUnanswered(l, true)
	s.arm(l.deadline)
	if s.phase == up {
		s.writeRequest(l, now)
	}
}

func (s *session) writeRequest(l *Lock, now time.Duration) {
	if !l.sent {
		l.sent, l.sentAt = true, now
	}
	l.resentAt, l.refused = now, false
	s.startKeepalive(now)
	s.out = appendRequest(s.out, l)
}

// send registers a call and sends it, now or on the next connection.
func (s *session) send(r *call, now time.Duration) {
	if r.ref == 0 {
		s.counter++
		r.ref, r.order = s.counter, s.counter
	}
	s.pending[r.ref] = r
	if r.deadline != 0 {
		s.arm(r.deadline)
	}
	if s.phase == up {
		s.write(r, now)
	}
}

func (s *session) write(r *call, now time.Duration) {
	r.resent, r.sentAt, r.refused = r.sentAt != 0, now, false
	s.startKeepalive(now)
	switch r.kind {
	case releaseCall:
		if r.id == 0 {
			s.out = appendReleaseByRef(s.out, r.lock.ref)
		} else {
			s.out = appendReleaseByID(s.out, r.id, r.ref)
		}
	case extendCall:
		s.out = appendExtend(s.out, r.id, r.timeout, r.ref)
	case inspectCall:
		s.out = appendInspect(s.out, r.query, r.ref)
	case watchCall:
		s.out = appendCommand(s.out, "watch", &r.prefix, r.ref)
	case unwatchCall:
		s.out = appendCommand(s.out, "unwatch", &r.prefix, r.ref)
	case pingCall:
		s.out = appendCommand(s.out, "ping", nil, r.ref)
	case byeCall:
		s.out = appendCommand(s.out, "bye", nil, r.ref)
	}
}

// release releases a held lock, or cancels a request that waits and was sent.
func (s *session) release(l *Lock, now time.Duration) *call {
	r := &call{kind: releaseCall, lock: l, id: l.id, done: make(chan struct{}), deadline: now + s.config.ConnectTimeout}
	l.state, l.release = releasing, r
	l.cancelAll()
	if r.id != 0 {
		s.setUnanswered(l, false)
		s.send(r, now)
		return r
	}
	s.counter++ // the ref is that of the request, so the call is not in `pending`
	r.order = s.counter
	if s.phase == up {
		s.write(r, now)
	}
	return r
}

// releaseID releases a lock that has no caller any more.
func (s *session) releaseID(id int64, now time.Duration) {
	s.send(&call{kind: releaseCall, id: id, abandoned: true}, now)
}

// abandon gives up a request whose caller does not wait any longer.
func (s *session) abandon(l *Lock, now time.Duration) {
	if l.state == waiting && !l.sent {
		s.end(l)
	} else if l.state == waiting || l.state == held {
		s.release(l, now).abandoned = true
	}
}

// drop gives up a call whose caller does not wait any longer. A release is still sent, and an extend
// that was sent may still change the lock.
func (s *session) drop(r *call) {
	r.abandoned = true
	if r.kind != releaseCall && (s.phase != up || r.sentAt == 0 || r.kind != extendCall) {
		delete(s.pending, r.ref)
	}
}

// extend extends a lock for which no caller waits: for its watchdog, or after a long wait in the queue.
func (s *session) extend(l *Lock, now time.Duration) {
	s.send(&call{kind: extendCall, lock: l, id: l.id, timeout: l.options.transactionTimeout, abandoned: true}, now)
}

// -- connections -------------------------------------------------------------------------------------

// connected begins the handshake on a new connection.
func (s *session) connected(now time.Duration) {
	s.phase, s.helloAt = handshake, now
	s.connection++
	s.closeReason, s.redirect, s.rejection, s.answered = "", "", nil, false
}

// disconnected keeps what must be sent again, and drops the rest.
func (s *session) disconnected(now time.Duration) {
	s.phase, s.out, s.keepalive, s.retryAt = down, nil, false, never
	s.retries.reset()
	for ref, r := range s.pending {
		if r.kind == releaseCall || !r.abandoned && r.kind <= pingCall {
			continue
		}
		delete(s.pending, ref)
		r.finish(nil)
	}
	for w := range s.watches {
		w.state, w.sent = lagging, false
	}
	for _, l := range s.locks {
		if l.state == held && l.options.releaseOnDisconnect {
			l.sessionEndsAt = min(l.sessionEndsAt, now+s.config.SessionTimeout)
			s.arm(l.sessionEndsAt)
		}
	}
}

func (s *session) onWelcome(m *welcome, now time.Duration) {
	if m.Protocol != protocolVersion {
		s.close(fmt.Sprintf("the server speaks protocol %d, not %d", m.Protocol, protocolVersion))
		return
	}
	if s.config.Namespace != "" && m.Namespace != s.config.Namespace {
		s.close(fmt.Sprintf("the server serves the namespace %q, not %q", m.Namespace, s.config.Namespace))
		return
	}
	s.phase = resuming
	s.setPingInterval(fromMS(m.PingInterval))
	if m.Resumed {
		return
	}
	for _, l := range s.locks {
		switch {
		case l.state == waiting: // it will be queued again, for the rest of its time
			s.forgetID(l, now)
		case l.state == held:
			s.releaseID(l.id, now)
			s.lose(l, reasonLost)
		case l.release.id == 0 && l.id == 0: // ended with the session
			s.end(l)
		case l.release.id == 0: // the new session does not know the ref
			l.release.id = l.id
			s.send(l.release, now)
		}
	}
}

func (s *session) forgetID(l *Lock, now time.Duration) {
	l.id = 0
	if timeout := l.options.queueTimeout; l.sent && timeout < maxTimeout {
		l.options.queueTimeout = max(0, l.sentAt+timeout-now)
	}
	l.sent = false
}

// resumed completes the handshake: the server has sent the state of all requests of the session.
func (s *session) resumed(now time.Duration) {
	s.phase = up
	s.startKeepalive(now)
	for _, l := range s.locks {
		if l.state != held {
			continue
		}
		if l.connection == s.connection {
			if l.options.watchdog {
				l.renewAt = now
				s.arm(now)
			}
		} else if !l.probed { // the lock is lost: the answer to a release contains the reason
			l.probed = true
			s.counter++
			s.pending[s.counter] = &call{
				kind: releaseCall, ref: s.counter, order: s.counter, lock: l, id: l.id, abandoned: true,
			}
		}
	}
	s.resend(now, false)
	s.sendWatches(now)
}

// resend sends the commands without an answer again, in the order in which they were first sent.
func (s *session) resend(now time.Duration, onlyRefused bool) {
	type item struct {
		order uint64
		lock  *Lock
		call  *call
	}
	var items []item
	for _, l := range s.locks {
		if onlyRefused && !l.refused {
			continue
		}
		if l.state == waiting {
			items = append(items, item{l.ref, l, nil})
		} else if l.state == releasing && l.release.id == 0 {
			l.refused = false
			items = append(items, item{l.release.order, nil, l.release})
		}
	}
	for _, r := range s.pending {
		if onlyRefused && !r.refused {
			continue
		}
		if r.kind == extendCall && r.lock.state == ended {
			delete(s.pending, r.ref)
			r.finish(r.lock.reason())
			continue
		}
		items = append(items, item{r.order, nil, r})
	}
	sort.Slice(items, func(i, j int) bool { return items[i].order < items[j].order })
	for _, item := range items {
		if item.lock != nil {
			s.writeRequest(item.lock, now)
		} else {
			s.write(item.call, now)
		}
	}
}

// shut ends all locks, calls and watches, because the client is closed.
func (s *session) shut(err error) {
	s.closed = err
	for w := range s.watches {
		s.endWatch(w, err)
	}
	for _, l := range s.locks {
		if l.state == waiting {
			s.fail(l, err)
		} else {
			s.loseAs(l, &LostError{ID: l.id, Reason: "the client does not manage it any more", Err: err})
		}
	}
	for ref, r := range s.pending {
		delete(s.pending, ref)
		r.finish(err)
	}
}

// -- messages ----------------------------------------------------------------------------------------

// handle processes a line from the server. An error means that the connection must be closed.
func (s *session) handle(line []byte, now time.Duration) error {
	if s.phase >= resuming {
		var l locked
		if parseLocked(line, &l) {
			s.onLocked(&l, now)
			return nil
		}
		var r released
		if parseReleased(line, &r) {
			s.onReleased(&r, now)
			return nil
		}
	}
	message, err := parseMessage(line)
	if err != nil {
		return fmt.Errorf("the server sent an invalid message: %.80q (%w)", line, err)
	}
	if s.phase == handshake {
		switch m := message.(type) {
		case *welcome:
			s.onWelcome(m, now)
		case *errorReply:
			s.onHandshakeError(m)
		case nil: // a message of a newer server
		default:
			return errors.New("the server did not answer hello")
		}
		s.anyAnswer = true
		return nil
	}
	switch m := message.(type) {
	case *locked:
		s.onLocked(m, now)
	case *released:
		s.onReleased(m, now)
	case *queuedReply:
		if l := s.locks[parseRef(m.Ref)]; l != nil && l.state == waiting {
			l.id = m.ID
		}
	case *extendedReply:
		s.onExtended(parseRef(m.Ref), now)
	case *pongReply:
		if s.phase == resuming && m.Ref == pingRef {
			s.resumed(now)
		} else if r := s.take(parseRef(m.Ref), pingCall); r != nil {
			r.finish(nil)
		}
	case *inspected:
		if r := s.take(parseRef(m.Ref), inspectCall); r != nil {
			r.result = m.inspection()
			r.finish(nil)
		}
	case *watching:
		s.onWatching(m)
	case *heldRow:
		s.onEvent(m, now)
	case *doneReply: // unwatched, bye
		if r := s.pending[parseRef(m.Ref)]; r != nil && (r.kind == unwatchCall || r.kind == byeCall) {
			delete(s.pending, r.ref)
			r.finish(nil)
		}
	case *errorReply:
		s.onError(m, now)
	}
	return nil
}

func (s *session) onLocked(m *locked, now time.Duration) {
	s.onAnswer()
	l := s.locks[m.ref]
	if l == nil { // unless it is released, it stays held until it times out
		s.config.Logf("genie: lock %d is released, because its ref %q is not known", m.ID, m.Ref)
		s.releaseID(m.ID, now)
		return
	}
	l.connection = s.connection
	since := l.resentAt
	if s.phase == resuming {
		since = s.helloAt
	}
	switch l.state {
	case waiting:
		l.id, l.fence, l.state = m.ID, m.Fence, held
		if l.anyOf != nil {
			l.choose(m.Resources)
		}
		s.setUnanswered(l, false)
		timeout := l.options.transactionTimeout
		if m.ExpiresIn != nil {
			s.hold(l, since, fromMS(*m.ExpiresIn))
		} else if now-l.sentAt > timeout/maxWaitShare {
			// The server counts from the grant, which may be as old as the request. After a long wait, an
			// extension leaves the caller the whole time.
			s.extend(l, now)
			s.hold(l, now, timeout)
		} else {
			s.hold(l, l.sentAt, timeout)
		}
		close(l.done)
	case held:
		if m.ExpiresIn != nil {
			s.hold(l, since, fromMS(*m.ExpiresIn))
		}
	case releasing:
		if l.id == 0 {
			l.id = m.ID
		}
	}
}

// maxWaitShare: a lock that waited for more than this part of its transaction timeout is extended when it is granted.
const maxWaitShare = 4

// hold starts the timers of a lock that the server holds for at least `timeout` after `since`.
func (s *session) hold(l *Lock, since, timeout time.Duration) {
	l.expiresAt, l.sessionEndsAt, l.renewAt = since+timeout, never, never
	if l.options.watchdog {
		l.renewAt = since + timeout/3
		s.arm(l.renewAt)
	}
	s.arm(l.expiresAt)
}

func (s *session) onReleased(m *released, now time.Duration) {
	s.onAnswer()
	if r := s.pending[m.ref]; r != nil && r.kind <= extendCall {
		delete(s.pending, r.ref)
		l := r.lock
		if l == nil { // a release without a caller
			return
		}
		if l.err == nil && (m.Reason != reasonSuccess || l.state == held) {
			s.lose(l, m.Reason) // before this client released or extended it
		}
		err := l.err
		if r.kind == releaseCall {
			s.end(l)
		} else if err == nil {
			err = ErrReleased
		}
		r.finish(err)
		return
	}
	l := s.locks[m.ref]
	switch {
	case l == nil: // the end of a request that is over for this client
	case l.state == waiting:
		s.fail(l, m.notGranted())
	case l.state == held:
		s.lose(l, m.Reason)
	case l.release.id == 0: // the answer to a release by ref
		s.end(l)
	case m.Reason != reasonSuccess && l.fence != 0: // it ended before the server received the release
		s.lose(l, m.Reason)
		l.release.abandoned = true
		l.release.finish(l.err)
	}
}

func (m *released) notGranted() error {
	switch m.Reason {
	case "queue-timeout":
		return &QueueTimeoutError{m.ID, fromMS(m.Waited), blockers(m.Blockers), max(int(m.BlockersTotal), len(m.Blockers))}
	case "deadlock":
		return &DeadlockError{m.ID, m.Cycle, m.Waits}
	case "insufficient":
		return &InsufficientError{m.ID, m.Free.Int, m.Locked.Int}
	case reasonTransactionTimeout: // granted and timed out while there was no connection
		return &LostError{ID: m.ID, Reason: m.Reason}
	}
	return &EndedError{m.ID, m.Reason}
}

func (s *session) onExtended(ref uint64, now time.Duration) {
	s.onAnswer()
	r := s.take(ref, extendCall)
	if r == nil {
		return
	}
	l := r.lock
	if l.state == held {
		l.options.transactionTimeout = r.timeout
		s.hold(l, r.sentAt, r.timeout)
	} else if l.state == ended && l.err != nil {
		s.releaseID(l.id, now) // lost by this client's clock, and extended at the server
	}
	r.finish(l.reason())
}

func (s *session) onHandshakeError(m *errorReply) {
	s.close("the server answered " + m.Code + ": " + m.Message)
	switch m.Code {
	case "unavailable":
		s.redirect = m.Leader
	case "unauthorized", "unknown-namespace", "unsupported-protocol":
		s.rejection = &RejectedError{m.Code, m.Message}
	}
}

func (s *session) onError(m *errorReply, now time.Duration) {
	if s.phase != up {
		s.onHandshakeError(m)
		s.rejection = nil
		return
	}
	ref := parseRef(m.Ref)
	l, r := s.locks[ref], s.pending[ref]
	byRef := l != nil && (l.state == waiting || l.state == releasing && l.release.id == 0)
	switch {
	case m.Code == "unavailable" && m.Leader != "":
		s.redirect = m.Leader
		s.close("the server is not the leader any more")
	case m.Code == "unavailable" && (byRef || r != nil && (r.kind != pingCall || !r.abandoned)):
		// The server cannot reach its store. It was not executed: send it again after a wait.
		if byRef {
			l.refused = true
		} else {
			r.refused = true
		}
		if s.retryAt == never {
			s.retryAt = now + s.retries.next()
			s.arm(s.retryAt)
		}
	case byRef:
		s.fail(l, &RejectedError{m.Code, m.Message})
	case r != nil:
		delete(s.pending, ref)
		s.onCallRejected(r, &RejectedError{m.Code, m.Message})
	default:
		s.config.Logf("genie: the server answered %s: %s", m.Code, m.Message)
	}
}

func (s *session) onCallRejected(r *call, err error) {
	l := r.lock
	switch {
	case r.kind == watchCall:
		s.endWatch(r.watch, err)
	case r.kind > extendCall || l == nil: // nothing depends on it
	case isUnknownID(err) && r.kind == releaseCall && r.resent && l.state == releasing:
		err = l.err // the server executed the release before
		s.end(l)
	case isUnknownID(err):
		if l.err == nil {
			s.lose(l, reasonLost)
		}
		err = l.err
	case r.kind == releaseCall && l.state == releasing: // the lock is still held
		l.state, l.release = held, nil
		s.arm(min(l.expiresAt, l.renewAt))
	}
	r.finish(err)
}

// -- timers ------------------------------------------------------------------------------------------

// onTimer handles the timers that are due, and sets nextTimer.
func (s *session) onTimer(now time.Duration, unavailable func() error) {
	s.nextTimer = never
	for _, l := range s.locks {
		switch l.state {
		case waiting:
			if l.deadline > now {
				s.arm(l.deadline)
				continue
			}
			l.err = unavailable()
			s.abandon(l, now)
			close(l.done)
		case held:
			if ends := min(l.expiresAt, l.sessionEndsAt); ends <= now {
				s.expire(l, now)
				continue
			} else {
				s.arm(ends)
			}
			if s.phase == up && l.renewAt <= now {
				l.renewAt = now + l.options.transactionTimeout/3
				s.extend(l, now)
			}
			if s.phase == up {
				s.arm(l.renewAt)
			}
		}
	}
	for _, r := range s.pending {
		if r.deadline == 0 || r.abandoned {
			continue
		} else if r.deadline > now {
			s.arm(r.deadline)
			continue
		}
		r.finish(unavailable())
		s.drop(r)
	}
	if s.retryAt <= now {
		s.retryAt = never
		s.resend(now, true)
	}
	s.arm(s.retryAt)
	s.checkServer(now)
	// Many timers at different times must not cause a scan of all locks for each of them.
	s.nextTimer = max(s.nextTimer, now+time.Duration(len(s.locks))*time.Microsecond)
}

// expire ends a lock whose time has passed by this client's clock.
func (s *session) expire(l *Lock, now time.Duration) {
	if s.phase != up || l.connection != s.connection {
		s.releaseID(l.id, now) // the server's clock stops while no server runs, so it may hold the lock for longer
	} else {
		l.stillHeld = true // by the server, for a moment
	}
	if l.sessionEndsAt < l.expiresAt {
		s.lose(l, reasonDisconnected)
	} else {
		s.lose(l, reasonTransactionTimeout)
	}
}

// checkServer pings a server that was silent for too long, and gives it up if it does not answer. The
// time for the answer is counted in steps, so that a client that was suspended reads first.
func (s *session) checkServer(now time.Duration) {
	if !s.keepalive {
		return
	}
	switch {
	case len(s.locks)+len(s.pending)+len(s.watches) == 0:
		s.keepalive = false
		return
	case s.pingSteps > 0 && now >= s.pingStepAt:
		if s.pingSteps++; s.pingSteps > 3 {
			s.close("the server does not answer")
		}
		s.pingStepAt = now + s.pingStep
	case s.pingSteps == 0 && now >= s.lastMessage+s.pingInterval:
		s.pingSteps, s.pingStepAt = 1, now+s.pingStep
		s.send(&call{kind: pingCall, abandoned: true}, now)
	}
	if s.pingSteps > 0 {
		s.arm(s.pingStepAt)
	} else {
		s.arm(s.lastMessage + s.pingInterval)
	}
}

// startKeepalive starts the ping timer, unless it runs: from now on the client expects messages.
func (s *session) startKeepalive(now time.Duration) {
	if !s.keepalive {
		s.keepalive = true
		s.onData(now)
		s.arm(now + s.pingInterval)
	}
}

func (s *session) onData(now time.Duration) { s.lastMessage, s.pingSteps = now, 0 }

func (s *session) setPingInterval(interval time.Duration) {
	if interval > 0 {
		s.pingInterval = min(max(interval, 100*time.Millisecond), s.config.ConnectTimeout/2)
	}
}

func (s *session) arm(at time.Duration) {
	if at < s.nextTimer {
		s.nextTimer = at
	}
}

// -- helpers -----------------------------------------------------------------------------------------

func (s *session) close(reason string) {
	if s.closeReason == "" {
		s.closeReason = reason
	}
}

// onAnswer notes that the server executes commands.
func (s *session) onAnswer() {
	s.answered = true
	s.retries.reset()
}

// take removes and returns the call of this kind with a ref, or returns nil.
func (s *session) take(ref uint64, kind kind) *call {
	s.onAnswer()
	r := s.pending[ref]
	if r == nil || r.kind != kind {
		return nil
	}
	delete(s.pending, ref)
	return r
}

// busy reports whether commands other than `own` wait for an answer.
func (s *session) busy(own int) bool { return len(s.pending)+s.unanswered > own }

func (s *session) setUnanswered(l *Lock, unanswered bool) {
	if l.unanswered != unanswered {
		l.unanswered = unanswered
		s.unanswered += map[bool]int{true: 1, false: -1}[unanswered]
	}
}

// end removes a request that is over.
func (s *session) end(l *Lock) {
	delete(s.locks, l.ref)
	s.setUnanswered(l, false)
	l.state = ended
	l.cancelAll()
}

// fail ends a request that was not granted.
func (s *session) fail(l *Lock, err error) {
	if l.state == waiting {
		l.err = err
		close(l.done)
	}
	s.end(l)
}

func (s *session) lose(l *Lock, reason string) { s.loseAs(l, &LostError{ID: l.id, Reason: reason}) }

// loseAs ends a lock that was granted, and records the reason.
func (s *session) loseAs(l *Lock, err *LostError) {
	l.err = err
	s.end(l)
}

// finish ends a call with an error, or nil, and wakes its caller.
func (r *call) finish(err error) {
	if r.done != nil {
		r.err = err
		close(r.done)
		r.done = nil
	}
}

// backoff computes the waits between attempts: 50 ms at first, then twice as long each time, at most
// 2 s, each times a random number between 0.5 and 1.
type backoff struct{ attempts int }

func (b *backoff) next() time.Duration {
	wait := 50 * time.Millisecond << min(b.attempts, 10)
	b.attempts++
	return time.Duration(float64(min(wait, 2*time.Second)) * (0.5 + rand.Float64()/2))
}

func (b *backoff) reset() { b.attempts = 0 }

// after returns now plus durations; never, if the first one has no limit.
func after(now, first, second time.Duration) time.Duration {
	if first >= maxTimeout {
		return never
	}
	return now + first + second
}

func min[T int | time.Duration](a, b T) T {
	if a < b {
		return a
	}
	return b
}

func max[T int | time.Duration](a, b T) T { return -min(-a, -b) }

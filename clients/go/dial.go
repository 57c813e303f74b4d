package genie

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"
)

const (
	stagger     = 250 * time.Millisecond // between the attempts of a round (RFC 8305)
	maxAttempt  = 5 * time.Second        // for a connection and its handshake, and for the wait for a lookup
	maxLookUp   = 30 * time.Second       // of a name; a resolver asks its second name server after 5 s
	stableAfter = 2 * time.Second        // a connection that lasted so long resets the backoff

	codeTakenOver = "session-taken-over" // another process uses the secret of the session
	maxTakeovers  = 3                    // in a row, after which the client ends
)

// round is one round of attempts to find the leader: it connects to each address of all names once, one after the other, and
// does not wait longer than `stagger` for the answer of one before it tries the next one, too. The first connection whose
// `hello` is accepted is used, and the others are closed.
type round struct {
	client   *Client
	ctx      context.Context // ends with the round
	queue    []endpoint
	lookUps  int // of names, that the round waits for
	lookedUp chan *lookUp
	attempts map[*conn]bool // the attempts that have not ended
	ended    chan *conn
	tried    map[string]bool // by HOST:PORT

	rejected   *RejectedError // the last rejection that is final for its address
	isRejected bool           // all attempts were rejected so
}

// endpoint is an address that was looked up.
type endpoint struct {
	address
	hostPort string
}

// lookUp is a lookup of a name. It may take longer than its round waits for it: then the next round gets its result.
type lookUp struct {
	address
	cancel context.CancelFunc
	ended  chan struct{}
	hosts  []string // after it has ended
}

// run connects in rounds, until the client is closed or all servers reject it.
func (c *Client) run() {
	defer close(c.stopped)
	var err error
	for err == nil {
		if conn, rejected := c.connect(); conn != nil {
			err = c.serve(conn)
		} else if rejected != nil && !c.isEntered {
			err = rejected
		} else if rejected != nil { // this may be temporary, for example while tokens are exchanged
			c.mu.Lock()
			c.abandonRequests(rejected)
			c.mu.Unlock()
		}
		select {
		case <-time.After(backoff(c.failedRounds)):
			c.failedRounds++
		case <-c.ctx.Done():
			err = ErrClosed
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut(err)
}

// connect makes one round. It returns a connection whose `hello` was accepted. If all addresses reject the client for good, it
// returns the error of the last one.
func (c *Client) connect() (*conn, *RejectedError) {
	ctx, cancel := context.WithCancel(c.ctx)
	r := &round{
		client: c, ctx: ctx, lookedUp: make(chan *lookUp), attempts: map[*conn]bool{}, ended: make(chan *conn),
		tried: map[string]bool{}, isRejected: true,
	}
	defer func() {
		cancel()
		for loser := range r.attempts {
			loser.close(errors.New("another connection is used"))
		}
	}()
	for _, a := range slices.Backward(append([]address{c.leader}, c.addresses...)) {
		r.add(a)
	}
	c.leader = address{}
	return r.firstAccepted()
}

// firstAccepted makes the attempts, and returns the first connection that is accepted.
func (r *round) firstAccepted() (*conn, *RejectedError) {
	timer := time.NewTimer(stagger)
	defer timer.Stop()
	for mayStart := true; ; {
		if len(r.queue) > 0 && (mayStart || len(r.attempts) == 0) {
			mayStart = !r.start()
			timer.Reset(stagger)
			continue
		}
		if len(r.queue)+r.lookUps+len(r.attempts) == 0 {
			if r.isRejected {
				return nil, r.rejected
			}
			return nil, nil
		}
		select {
		case <-timer.C:
			mayStart = true
		case l := <-r.lookedUp:
			r.lookUps--
			r.addHosts(l)
		case conn := <-r.ended:
			delete(r.attempts, conn)
			if conn.err == nil {
				conn.isAlone = len(r.attempts) == 0
				clear(r.client.lateLookUps) // the next round may be much later
				return conn, nil
			}
			r.fail(conn.address, conn.err)
			mayStart = true
		case <-r.ctx.Done():
			return nil, nil
		}
	}
}

// add adds an address to the front of the queue. A name is looked up first.
func (r *round) add(a address) {
	if net.ParseIP(a.host) != nil {
		r.queue = append([]endpoint{{a, a.String()}}, r.queue...)
	} else if a.host != "" {
		r.lookUps++
		l := r.client.lookUp(a)
		go func() {
			timer := time.NewTimer(maxAttempt)
			defer timer.Stop()
			select {
			case <-l.ended:
			case <-timer.C:
			case <-r.ctx.Done():
				l.cancel()
			}
			select {
			case r.lookedUp <- l:
			case <-r.ctx.Done():
			}
		}()
	}
}

// lookUp begins to look up a name, or returns the lookup that was too late for the last round.
func (c *Client) lookUp(a address) *lookUp {
	if late := c.lateLookUps[a]; late != nil {
		delete(c.lateLookUps, a)
		return late
	}
	ctx, cancel := context.WithTimeout(c.ctx, maxLookUp)
	l := &lookUp{address: a, cancel: cancel, ended: make(chan struct{})}
	go func() {
		defer close(l.ended)
		defer cancel()
		var err error
		if l.hosts, err = c.config.lookUpHost(ctx, a.host); err != nil {
			l.hosts = []string{a.host} // the attempt fails in the same way
		}
	}()
	return l
}

// addHosts adds the addresses of a name to the front of the queue, unless its lookup has not ended.
func (r *round) addHosts(l *lookUp) {
	select {
	case <-l.ended:
		var endpoints []endpoint
		for _, host := range l.hosts {
			endpoints = append(endpoints, endpoint{l.address, net.JoinHostPort(host, l.port)})
		}
		r.queue = append(endpoints, r.queue...)
	default:
		r.client.lateLookUps[l.address] = l
		r.fail(l.address, errors.New("the lookup of the name takes too long"))
	}
}

// start begins the next attempt. It returns false if the endpoint was tried before in this round.
func (r *round) start() bool {
	next := r.queue[0]
	if r.queue = r.queue[1:]; r.tried[next.hostPort] {
		return false
	}
	r.tried[next.hostPort] = true
	conn := r.client.newConn(next.address)
	r.attempts[conn] = true
	go func() {
		if conn.err = conn.attempt(next.hostPort); conn.err != nil {
			conn.timer.Stop()
			conn.close(conn.err)
			conn.err = context.Cause(conn.ctx) // for example that the handshake takes too long
		}
		select {
		case r.ended <- conn:
		case <-r.ctx.Done():
			conn.close(conn.err)
		}
	}()
	return true
}

// fail notes why an attempt has failed. A follower names the leader, which is tried next.
func (r *round) fail(a address, err error) {
	r.client.config.Logger.Debug("genie: connection failed", "address", a, "error", err)
	r.client.mu.Lock()
	r.client.lastFailure = fmt.Errorf("%s: %w", a, err)
	r.client.mu.Unlock()
	var rejected *RejectedError
	if errors.As(err, &rejected) && rejected.isFinal() {
		r.rejected = rejected
	} else {
		r.isRejected = false
	}
	r.add(r.client.leaderOf(a, err))
}

// leaderOf returns the address of the leader that the error of a server names, or none. An address with a prefix is invalid:
// a server must not turn TLS off for the next connection, which sends the token.
func (c *Client) leaderOf(a address, err error) (leader address) {
	var rejected *RejectedError
	if errors.As(err, &rejected) && !strings.Contains(rejected.leader, "/") {
		leader, _ = c.config.parseAddress(rejected.leader, a.isSecure)
	}
	return leader
}

// serve handles the messages of a connection until it ends. An error ends the client.
func (c *Client) serve(conn *conn) error {
	next := slices.Index(c.addresses, conn.address) + 1 // the next round begins with the address after it
	c.addresses = slices.Concat(c.addresses[next:], c.addresses[:next])
	c.mu.Lock()
	c.served = conn
	c.mu.Unlock()
	err := conn.read()
	conn.close(err)
	conn.timer.Stop()
	err = context.Cause(conn.ctx)
	c.mu.Lock()
	c.served = nil
	wasUp, isClosed := c.conn == conn, c.closed != nil
	if wasUp {
		c.disconnect()
	}
	c.lastFailure = fmt.Errorf("%s: %w", conn.address, err)
	c.mu.Unlock()
	if !isClosed {
		c.config.Logger.Warn("genie: connection lost", "address", conn.address, "error", err)
	}
	if wasUp {
		c.config.OnEvent(Event{"down", conn.address.String(), err})
	}
	c.leader = c.leaderOf(conn.address, err)
	var rejected *RejectedError
	if !errors.As(err, &rejected) || rejected.Code != codeTakenOver || !conn.isAlone {
		c.takeovers = 0
	} else if c.takeovers++; c.takeovers == maxTakeovers {
		return rejected
	}
	return nil
}

func (c *Client) emitUp(a address) {
	state := "up"
	if c.lastUp != (address{}) && c.lastUp != a {
		state = "leader"
	}
	c.lastUp = a
	c.config.OnEvent(Event{state, a.String(), nil})
}

package genie

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
)

const (
	stagger     = 250 * time.Millisecond // between the attempts of a round (RFC 8305)
	maxAttempt  = 5 * time.Second        // for a connection and its handshake
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
	lookUps  int // of names, that have not ended
	found    chan found
	attempts map[*conn]bool // those that have not ended
	ended    chan *conn
	tried    map[string]bool // by HOST:PORT

	rejected *RejectedError // the last rejection that is final for its address
	isFinal  bool           // all attempts were rejected so
}

// endpoint is an address that was looked up.
type endpoint struct {
	address
	hostPort string
}

// found is the result of the look-up of a name.
type found struct {
	endpoints []endpoint
	isNext    bool // it is the leader's
	err       error
}

// run connects in rounds, until the client is closed or all servers reject it.
func (c *Client) run() {
	defer close(c.stopped)
	var err error
	for err == nil {
		conn, rejected := c.connect()
		switch {
		case conn != nil:
			err = c.serve(conn)
		case rejected != nil:
			err = c.reject(rejected)
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

// connect makes one round. It returns a connection whose handshake is complete. If all addresses reject the client for good,
// it returns the error of the last one.
func (c *Client) connect() (*conn, *RejectedError) {
	ctx, cancel := context.WithCancel(c.ctx)
	r := &round{
		client: c, ctx: ctx, found: make(chan found), attempts: map[*conn]bool{}, ended: make(chan *conn),
		tried: map[string]bool{}, isFinal: true,
	}
	defer func() {
		cancel()
		for loser := range r.attempts {
			loser.close(errors.New("another connection is used"))
		}
	}()
	for _, a := range append([]address{c.leader}, c.addresses...) {
		r.lookUp(a, false)
	}
	c.leader = address{}
	timer := time.NewTimer(stagger)
	defer timer.Stop()
	for mayStart := true; ; {
		if len(r.queue) > 0 && (mayStart || len(r.attempts) == 0) {
			mayStart = !r.start()
			timer.Reset(stagger)
			continue
		}
		if len(r.queue)+r.lookUps+len(r.attempts) == 0 {
			if r.isFinal {
				return nil, r.rejected
			}
			return nil, nil
		}
		select {
		case <-timer.C:
			mayStart = true
		case names := <-r.found:
			r.lookUps--
			r.add(names)
		case conn := <-r.ended:
			delete(r.attempts, conn)
			if conn.err == nil {
				conn.isAlone = len(r.attempts) == 0
				return conn, nil
			}
			r.fail(conn.address, conn.err)
			mayStart = true
		case <-ctx.Done():
			return nil, nil
		}
	}
}

// lookUp adds the addresses of a name to the queue, or later sends them to `found`.
func (r *round) lookUp(a address, isNext bool) {
	if a == (address{}) {
		return
	}
	if net.ParseIP(a.host) != nil {
		r.add(found{[]endpoint{{a, a.String()}}, isNext, nil})
		return
	}
	r.lookUps++
	go func() {
		hosts, err := r.client.config.lookUpHost(r.ctx, a.host)
		result := found{nil, isNext, err}
		for _, host := range hosts {
			result.endpoints = append(result.endpoints, endpoint{a, net.JoinHostPort(host, a.port)})
		}
		select {
		case r.found <- result:
		case <-r.ctx.Done():
		}
	}()
}

func (r *round) add(names found) {
	if names.err != nil {
		r.fail(address{}, names.err)
	}
	if r.queue = append(r.queue, names.endpoints...); names.isNext {
		r.queue = append(names.endpoints[:len(names.endpoints):len(names.endpoints)], r.queue[:len(r.queue)-len(names.endpoints)]...)
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
		conn.err = conn.handshake(next.hostPort)
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
	c := r.client
	c.config.Logger.Debug("genie: connection failed", "address", a, "error", err)
	c.mu.Lock()
	c.lastFailure = fmt.Errorf("%s: %w", a, err)
	c.mu.Unlock()
	var rejected *RejectedError
	if !errors.As(err, &rejected) || !rejected.isFinal() {
		r.isFinal = false
	} else {
		r.rejected = rejected
	}
	if leader, err := c.leaderOf(a, rejected); err == nil {
		r.lookUp(leader, true)
	}
}

// leaderOf returns the address of the leader that a server has named.
func (c *Client) leaderOf(a address, rejected *RejectedError) (address, error) {
	if rejected == nil || rejected.leader == "" {
		return address{}, errors.New("no leader")
	}
	return c.config.parseAddress(rejected.leader, a.isSecure)
}

// serve handles the messages of a connection until it ends. An error ends the client.
func (c *Client) serve(conn *conn) error {
	for i, a := range c.addresses { // the next round begins with the address after it
		if a == conn.address {
			c.addresses = append(c.addresses[i+1:len(c.addresses):len(c.addresses)], c.addresses[:i+1]...)
			break
		}
	}
	err := conn.read()
	conn.close(err)
	conn.timer.Stop()
	err = context.Cause(conn.ctx)
	c.mu.Lock()
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
		c.emit("down", conn.address, err)
	}
	var rejected *RejectedError
	errors.As(err, &rejected)
	c.leader, _ = c.leaderOf(conn.address, rejected)
	if rejected == nil || rejected.Code != codeTakenOver || !conn.isAlone {
		c.takeovers = 0
	} else if c.takeovers++; c.takeovers == maxTakeovers {
		return rejected
	}
	return nil
}

// reject handles that all addresses reject the client for good. While Dial waits, that ends the client. Later it may be
// temporary, for example while tokens are exchanged: calls fail, and the client tries again.
func (c *Client) reject(rejected *RejectedError) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.isEntered {
		return rejected
	}
	for _, r := range c.calls {
		if r.name == "request" {
			c.abandon(r, rejected)
		}
	}
	return nil
}

func (c *Client) emitUp(a address) {
	state := "up"
	if c.lastUp != (address{}) && c.lastUp != a {
		state = "leader"
	}
	c.lastUp = a
	c.emit(state, a, nil)
}

func (c *Client) emit(state string, a address, err error) {
	if c.config.OnEvent != nil {
		c.config.OnEvent(Event{state, a.String(), err})
	}
}

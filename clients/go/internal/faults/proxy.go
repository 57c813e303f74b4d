package main

import (
	"io"
	"net"
	"sync"
	"time"
)

// maxSilence is for how long the client's side of a half-open connection stays open.
const maxSilence = 20 * time.Second

// proxy forwards connections to a server.
type proxy struct {
	net.Listener
	server string

	mu    sync.Mutex
	links map[*link]bool
}

// link is a forwarded connection.
type link struct {
	client, server net.Conn
	mu             sync.Mutex
	isHalfOpen     bool
}

// newProxy returns a proxy without a server: set it before the first connection.
func newProxy() (*proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	p := &proxy{Listener: listener, links: map[*link]bool{}}
	if err == nil {
		go p.accept()
	}
	return p, err
}

func (p *proxy) accept() {
	for {
		client, err := p.Listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.server)
		if err != nil {
			client.Close()
			continue
		}
		l := &link{client: client, server: server}
		p.mu.Lock()
		p.links[l] = true
		p.mu.Unlock()
		go p.forward(l, client, server)
		go p.forward(l, server, client)
	}
}

func (p *proxy) forward(l *link, from, to net.Conn) {
	_, _ = io.Copy(to, from)
	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.server.Close(); !l.isHalfOpen {
		l.client.Close()
	}
}

// halfOpen makes a connection half-open, and returns how many that are: 1, or 0 if there is no connection.
func (p *proxy) halfOpen() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links { // in random order
		l.mu.Lock()
		l.isHalfOpen = true
		l.mu.Unlock()
		delete(p.links, l)
		_ = l.server.(*net.TCPConn).SetLinger(0) // Close resets the connection
		l.server.Close()
		time.AfterFunc(maxSilence, func() { l.client.Close() })
		return 1
	}
	return 0
}

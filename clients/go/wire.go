package genie

import (
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"time"
	"unicode/utf8"
)

const (
	protocolVersion = 1
	clientName      = "genie-go/1.0.0-rc.1"
	maxCommand      = 1 << 20       // bytes in a line, of the server
	maxMessage      = 2 << 20       // bytes in a line of the server, as the protocol advises
	maxTimeoutMS    = math.MaxInt32 // as a queue timeout: no limit
	maxDigits       = 100           // of a sum of weights: at most as many weights of 78 digits as a request may have names
	maxTimeout      = maxTimeoutMS * time.Millisecond

	reasonSuccess            = "success"
	reasonTransactionTimeout = "transaction-timeout"
	reasonDisconnected       = "disconnected"
	reasonLost               = "lost" // not a reason of the wire: the server does not know the lock
)

// fields are the fields of all commands. protocol.md describes them.
type fields struct {
	Ref                string   `json:"ref"`
	ID                 int64    `json:"id,omitempty"`
	Resources          []string `json:"resources,omitempty"`
	AnyOf              []string `json:"anyOf,omitempty"`
	Weights            []string `json:"weights,omitempty"`
	Target             string   `json:"target,omitempty"`
	QueueTimeout       *float64 `json:"queueTimeout,omitempty"`
	TransactionTimeout *float64 `json:"transactionTimeout,omitempty"`
	Transaction        string   `json:"transactionName,omitempty"`
	Priority           int      `json:"priority,omitempty"`
	OnDisconnect       string   `json:"onDisconnect,omitempty"`
	Note               string   `json:"note,omitempty"`
	Traceparent        string   `json:"traceparent,omitempty"`
	Prefix             *string  `json:"prefix,omitempty"`
	Resource           string   `json:"resource,omitempty"`
	Limit              int      `json:"limit,omitempty"`
	Only               string   `json:"only,omitempty"`
	Protocol           int      `json:"protocol,omitempty"`
	Client             string   `json:"client,omitempty"`
	Quiet              bool     `json:"quiet,omitempty"`
	Session            string   `json:"session,omitempty"`
	SessionTimeout     *float64 `json:"sessionTimeout,omitempty"`
	Token              string   `json:"token,omitempty"`
	Namespace          string   `json:"namespace,omitempty"`
}

// encode returns the line of a command.
func encode(name string, f *fields) []byte {
	if name == "release" && f.ID != 0 { // frequent, and three times as fast as by reflection
		return fmt.Appendf(nil, `{"command":"release","payload":{"ref":%q,"id":%d}}`+"\n", f.Ref, f.ID)
	}
	line, err := json.Marshal(struct {
		Command string  `json:"command"`
		Payload *fields `json:"payload"`
	}{name, f})
	if err != nil {
		panic(err) // texts and finite numbers can be encoded
	}
	return append(line, '\n')
}

// check returns an error for a command that the server could not answer by its ref, because the line is too long, or would
// execute with other texts.
func (f *fields) check(line []byte) error {
	if len(line) > maxCommand {
		return &RejectedError{Code: "bad-request", Message: fmt.Sprintf("a command must not have more than %d bytes", maxCommand)}
	}
	var prefix string
	if f.Prefix != nil {
		prefix = *f.Prefix
	}
	for _, texts := range [][]string{
		f.Resources, f.AnyOf, {f.Transaction, f.Note, f.Traceparent, f.Resource, f.Only, f.Token, f.Namespace, prefix},
	} {
		for _, text := range texts {
			if !utf8.ValidString(text) {
				return &RejectedError{Code: "bad-request", Message: fmt.Sprintf("%q is not valid UTF-8", text)}
			}
		}
	}
	return nil
}

// message is a message of the server.
type message struct {
	Command string
	Payload payload
}

// isKnown returns whether the client handles a message. Without its fields a command would have no answer.
func isKnown(command string) bool {
	switch command {
	case "welcome", "locked", "released", "extended", "pong", "inspected", "watching", "unwatched", "event", "bye", "error":
		return true
	}
	return false
}

// payload has the fields of all messages. protocol.md describes them.
type payload struct {
	Ref       string
	Fence     int64
	ExpiresIn *float64
	Resources []string
	Inspection
	Change // of `event`; also the ID of all messages

	Reason                           string
	Blockers                         []Blocker
	BlockersTotal                    int
	Cycle                            []string
	Waits                            []WaitEdge
	Free, Locked                     json.Number
	Held                             json.RawMessage // of `watching`: rows; of `released`: a number
	Code, Message, Leader, Namespace string

	Waited, PingInterval float64
	Resumed              bool
}

type (
	plainBlocker Blocker
	plainRequest Request
)

// wireBlocker is a blocker as on the wire: its fields hide those of the blocker.
type wireBlocker struct {
	*plainBlocker
	Since float64 `json:"since"`
}

// wireRequest is a request as on the wire: its fields hide those of the request.
type wireRequest struct {
	*plainRequest
	Since     float64  `json:"since"`
	ExpiresIn *float64 `json:"expiresIn,omitempty"`
}

// UnmarshalJSON decodes a blocker as the server sends it.
func (b *Blocker) UnmarshalJSON(text []byte) error {
	row := wireBlocker{plainBlocker: (*plainBlocker)(b)}
	err := json.Unmarshal(text, &row)
	b.Since = unixMS(row.Since)
	return err
}

// MarshalJSON encodes a blocker as the server does.
func (b Blocker) MarshalJSON() ([]byte, error) {
	return json.Marshal(wireBlocker{(*plainBlocker)(&b), toUnixMS(b.Since)})
}

// UnmarshalJSON decodes a request as the server sends it.
func (r *Request) UnmarshalJSON(text []byte) error {
	row := wireRequest{plainRequest: (*plainRequest)(r)}
	err := json.Unmarshal(text, &row)
	r.Since, r.ExpiresIn = unixMS(row.Since), NoTimeout
	if row.ExpiresIn != nil {
		r.ExpiresIn = fromMS(*row.ExpiresIn)
	}
	return err
}

// MarshalJSON encodes a request as the server does.
func (r Request) MarshalJSON() ([]byte, error) {
	row := wireRequest{plainRequest: (*plainRequest)(&r), Since: toUnixMS(r.Since)}
	if r.ExpiresIn != NoTimeout {
		row.ExpiresIn = toMS(r.ExpiresIn)
	}
	return json.Marshal(row)
}

// toMS returns a duration in milliseconds. A duration beyond the limit of the protocol becomes the limit.
func toMS(d time.Duration) *float64 {
	ms := math.Min(float64(d)/float64(time.Millisecond), maxTimeoutMS)
	return &ms
}

func fromMS(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

func unixMS(ms float64) time.Time { return time.UnixMicro(int64(ms * 1000)) }

func toUnixMS(t time.Time) float64 { return float64(t.UnixMicro()) / 1000 }

// toBig returns a sum of weights. It is 0 if the server has sent no sum: another number could be of any size.
func toBig(n json.Number) *big.Int {
	if sum, ok := new(big.Int).SetString(n.String()[:min(len(n), maxDigits)], 10); ok && len(n) <= maxDigits {
		return sum
	}
	return new(big.Int)
}

// rejection returns the error that the server has sent.
func (p *payload) rejection() *RejectedError { return &RejectedError{p.Code, p.Message, p.Leader} }

// notGranted returns the error for the end of a request.
func (p *payload) notGranted() error {
	switch p.Reason {
	case "queue-timeout":
		return &QueueTimeoutError{p.ID, fromMS(p.Waited), p.Blockers, p.BlockersTotal}
	case "deadlock":
		return &DeadlockError{p.ID, p.Cycle, p.Waits}
	case "insufficient":
		return &InsufficientError{p.ID, toBig(p.Free), toBig(p.Locked)}
	case reasonTransactionTimeout: // granted and timed out while there was no connection
		return &LostError{ID: p.ID, Reason: p.Reason}
	}
	return &EndedError{p.ID, p.Reason}
}
